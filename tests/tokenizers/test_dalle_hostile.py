"""Pickles that would run code: each is refused by the name of what it asks for, and none runs.

They are assembled by hand, and Python's own unpickler shows that they are live.
"""

import contextlib
import copyreg
import functools
import io
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT, command
from dalle_files import (
    FOUR,
    LAYOUTS,
    TWO,
    Write,
    call,
    named,
    old_streams,
    persistent,
    refusal,
    stack_named,
    state_dict,
    tensor,
    text,
)
from torch import nn

EXTENSION = 240  # a code that copyreg leaves to private use


@pytest.fixture(params=LAYOUTS)
def write(request: pytest.FixtureRequest) -> Write:
    return LAYOUTS[request.param]


class Inner:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


class LoadsAnother:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(torch.load, str(self.path), weights_only=False), ()


def inner_file(canary: Path) -> bytes:
    torch.save(Inner(canary), canary.with_name("inner.pt"))
    return pickle.dumps(LoadsAnother(canary.with_name("inner.pt")), 2)


def touch(canary: Path) -> bytes:
    return text(f"touch {canary}")


SYSTEM = named("posix", "system")
MODULE = named("dall_e.encoder", "Encoder") + b")\x81"  # a new one, without its __init__
SET_HOOK = b"}" + text("__setstate__") + SYSTEM + b"sb"  # its next state is a command
Trap = Callable[[Path], bytes]
# Each with the global that the message names.
TRAPS: dict[str, tuple[Trap, str]] = {
    "GLOBAL": (lambda c: TWO + call(SYSTEM, touch(c)) + b".", "posix.system"),
    "STACK_GLOBAL": (
        lambda c: FOUR + call(stack_named("posix", "system"), touch(c)) + b".", "posix.system"),
    "INST": (lambda c: TWO + b"(" + touch(c) + b"iposix\nsystem\n.", "posix system"),
    "OBJ": (lambda c: TWO + b"(" + named("subprocess", "Popen") + text("touch")
            + b"oNb.", "subprocess.Popen"),
    "EXT1": (lambda c: TWO + call(b"\x82" + bytes([EXTENSION]), touch(c)) + b".", "EXT1"),
    "eval": (lambda c: TWO + call(named("__builtin__", "eval"),
             text(f"__import__('os').system('touch {c}')")) + b".", "__builtin__.eval"),
    "exec": (lambda c: FOUR + call(stack_named("builtins", "exec"),
             text(f"import os; os.system('touch {c}')")) + b".", "builtins.exec"),
    "nested attribute": (
        lambda c: FOUR + call(stack_named("torch", "os.system"), touch(c)) + b".",
        "torch.os.system"),
    "nested attribute of a known module": (
        lambda c: FOUR + call(named("torch._utils", "torch.os.system"), touch(c)) + b".",
        "torch._utils.torch.os.system"),
    "getattr": (
        lambda c: TWO + call(call(named("__builtin__", "getattr"), call(
            named("importlib", "import_module"), text("os")), text("system")), touch(c)) + b".",
        "__builtin__.getattr"),
    "a pickle in the pickle": (
        lambda c: TWO + call(named("_pickle", "loads"), pickle.dumps(
            pickle.dumps(Inner(c), 2), 3)[2:-1]) + b".", "_pickle.loads"),
    "torch.load of a file beside it": (inner_file, "functools.partial"),
    "a command as __setstate__": (
        lambda c: TWO + MODULE + SET_HOOK + touch(c) + b"b.", "posix.system"),
    "within a persistent id": (
        lambda c: TWO + persistent(text("storage"), call(SYSTEM, touch(c))) + b".",
        "posix.system"),
    "among the weights": (lambda c: state_dict(call(SYSTEM, touch(c))), "posix.system"),
    "remembered, and called later": (
        lambda c: TWO + SYSTEM + b"q\x01" + b"0" + b"h\x01" + b"(" + touch(c) + b"tR.",
        "posix.system"),
}  # fmt: skip


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    copyreg.add_extension("posix", "system", EXTENSION)
    yield tmp_path / "executed"
    copyreg.remove_extension("posix", "system", EXTENSION)


class Naive(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return pid


@pytest.mark.parametrize("name", [name for name in TRAPS if name != "OBJ"])
def test_the_traps_are_live(name: str, canary: Path) -> None:
    with contextlib.suppress(pickle.UnpicklingError, AttributeError, TypeError):
        Naive(io.BytesIO(TRAPS[name][0](canary))).load()
    assert canary.exists()


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_does_nothing_and_is_named(name: str, write: Write, canary: Path) -> None:
    trap, asked = TRAPS[name]
    path = canary.with_name("encoder.pkl")
    write(path, trap(canary))
    assert asked in refusal(path)
    path.write_bytes(trap(canary))  # as pickle.dump writes it, in no layout of torch
    assert asked in refusal(path)
    assert not canary.exists()


@pytest.mark.parametrize("stream", range(5))
def test_a_trap_in_any_stream_of_the_older_layout(stream: int, canary: Path) -> None:
    streams = old_streams(state_dict(tensor()))
    streams[stream] = TRAPS["GLOBAL"][0](canary)
    path = canary.with_name("encoder.pkl")
    path.write_bytes(b"".join(streams) + struct.pack("<q4f", 4, *range(4)))
    assert "posix.system" in refusal(path)
    assert not canary.exists()


def test_even_known_names_are_not_imported(tmp_path: Path, dalle_encoder: nn.Module) -> None:
    torch.save(dalle_encoder, tmp_path / "encoder.pkl", _use_new_zipfile_serialization=False)
    code = f"""
import sys
from pathlib import Path
from mimkit.tokenizers._dalle_layouts import read_torch_file
print(len(read_torch_file(Path({str(tmp_path / "encoder.pkl")!r}))), "dall_e" in sys.modules)
"""
    ended = command(["-c", code], cwd=ROOT)
    assert ended.out.split() == [str(len(dalle_encoder.state_dict())), "False"], ended.err
