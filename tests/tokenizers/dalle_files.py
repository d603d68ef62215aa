"""Files of torch.save assembled by hand, opcode by opcode, to say what it never says."""

import pickle
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mimkit.errors import UserError
from mimkit.tokenizers._dalle_file import load_dalle

TWO, FOUR = b"\x80\x02", b"\x80\x04"  # protocols


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def stack_named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value) if abs(value) < 2**31 else pickle.dumps(value, 2)[2:-1]


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def persistent(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"tQ"


FLOATS = named("torch", "FloatStorage")
ORDERED = call(named("collections", "OrderedDict"))


def storage(*, key: str = "0", numel: int = 4, kind: bytes = FLOATS) -> bytes:
    return persistent(text("storage"), kind, text(key), text("cpu"), number(numel), b"N")


def tensor(
    *, lies_in: bytes = storage(), offset: int = 0, shape: bytes = numbers(4),
    stride: bytes = numbers(1),
) -> bytes:  # fmt: skip
    rebuild = named("torch._utils", "_rebuild_tensor_v2")
    return call(rebuild, lies_in, number(offset), shape, stride, b"\x89", ORDERED)


def state_dict(value: bytes) -> bytes:
    return TWO + b"}" + text("w") + value + b"s."


def write_zip(path: Path, body: bytes, **more: bytes) -> None:
    entries = {"data.pkl": body, "byteorder": b"little", "data/0": struct.pack("<4f", *range(4))}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (entries | more).items():
            archive.writestr(f"encoder/{name}", content)


def old_streams(body: bytes, keys: Sequence[str] = ("0",)) -> list[bytes]:
    """Magic number, version, system, object, keys; storages are behind them."""
    system = {"protocol_version": 1001, "little_endian": True}
    return [*(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, system)),
            body, pickle.dumps(list(keys), 2)]  # fmt: skip


def write_old(path: Path, body: bytes) -> None:
    path.write_bytes(b"".join(old_streams(body)) + struct.pack("<q4f", 4, *range(4)))


Write = Callable[[Path, bytes], None]
LAYOUTS: dict[str, Write] = {"zip": write_zip, "older": write_old}


def refusal(path: Path) -> str:
    """What the user reads about a pickle: one paragraph, fit to be printed."""
    with pytest.raises(UserError) as caught:
        load_dalle(path)
    message = str(caught.value)
    assert f"'{path}' was refused, and nothing in it was executed: " in message
    assert "Expected is what torch.save writes of DALL-E's encoder or decoder" in message
    assert message.isprintable() and len(message) < 1000
    return message
