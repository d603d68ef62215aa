"""Pickles of known names that contradict themselves or are damaged: refused, at no cost."""

import random
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from dalle_files import (
    FLOATS,
    FOUR,
    LAYOUTS,
    TWO,
    Write,
    call,
    named,
    number,
    numbers,
    old_streams,
    persistent,
    refusal,
    state_dict,
    storage,
    tensor,
    text,
    write_zip,
)
from torch import nn

from mimkit.errors import UserError
from mimkit.tokenizers._dalle_file import load_dalle
from mimkit.tokenizers._dalle_layouts import read_torch_file


@pytest.fixture(params=LAYOUTS)
def write(request: pytest.FixtureRequest) -> Write:
    return LAYOUTS[request.param]


def test_a_file_assembled_by_hand_is_read(write: Write, tmp_path: Path) -> None:
    """What the refusals below differ from by one thing each."""
    write(tmp_path / "good.pth", state_dict(tensor()))
    assert torch.equal(read_torch_file(tmp_path / "good.pth")["w"], torch.arange(4.0))


CONV = named("dall_e.utils", "Conv2d") + b")\x81"
DEEP = b"(" * 50_000 + b"t" * 50_000
# The object's pickle, and what is said of it (in one layout | in the other).
WRONG: dict[str, tuple[bytes, str]] = {
    "state of a class": (TWO + FLOATS + b"}b.", "sets the state of 'torch.FloatStorage'"),
    "state of a number": (TWO + b"K\x01}b.", "sets the state of a int"),
    "state twice": (TWO + CONV + b"}b}b.", "sets the state of 'dall_e.utils.Conv2d'"),
    "call of a module": (TWO + call(CONV) + b".", "calls 'dall_e.utils.Conv2d'"),
    "call of text": (TWO + call(text("torch")) + b".", "calls a str"),
    "call with a list": (TWO + FLOATS + b"]R.", "with a list"),
    "items into a module": (TWO + CONV + text("w") + b"Ns.", "puts 2 items into"),
    "items into a tuple": (TWO + b")Na.", "puts 1 items into a tuple"),
    "an odd number of items": (TWO + b"}(Nu.", "puts 1 items into a dict"),
    "a key without end": (TWO + b"}" + DEEP + b"Ns.", "neither text nor numbers"),
    "an ordered dictionary with arguments": (
        TWO + call(named("collections", "OrderedDict"), b"]") + b".", "is no dictionary"),
    "a name that is no text": (FOUR + b"NN\x93.", "neither text nor numbers"),
    "opcode PERSID": (TWO + b"P0\n.", "PERSID '0'"),
    "opcode NEWOBJ_EX": (FOUR + FLOATS + b")}\x92.", "NEWOBJ_EX"),
    "opcode POP_MARK": (TWO + b"(1.", "POP_MARK"),
    "no opcode": (TWO + b"\xff.", "no whole pickle"),
    "empty stack": (TWO + b".", "no whole pickle"),
    "no mark": (TWO + b"t.", "no whole pickle"),
    "nothing remembered": (TWO + b"j\xff\xff\xff\x7f.", "remembers nothing under 2147483647"),
    "quotes that do not end": (TWO + b"S'" + b"w" * 5000 + b"\n.", "no whole pickle"),
    "4 GiB of text": (TWO + b"X\xff\xff\xff\xff.", "no whole pickle"),
    "8 EiB of bytes": (FOUR + b"\x8e" + b"\xff" * 7 + b"\x7f.", "no whole pickle"),
    "a text": (TWO + text("weights") + b".", "is no dictionary"),
    "a device": (TWO + call(named("torch", "device"), text("cpu")) + b".", "is no dictionary"),
    "unprintable names": (TWO + b"}" + text("\x1b[2J") + b"Ns.", "is no dictionary"),
    "names without end": (TWO + b"}" + text("w" * 9999) + b"Ns.", "is no dictionary"),
    "a weight without a tensor": (state_dict(b"N"), "'w' is no tensor"),
    "a parameter of nothing": (
        state_dict(call(named("torch._utils", "_rebuild_parameter"))), "'w' is no tensor"),
    "a tensor in no storage": (state_dict(tensor(lies_in=text("0"))), "'w' is no tensor"),
    "a shape of text": (state_dict(tensor(shape=b"(" + text("4") + b"t")), "'w' is no tensor"),
    "a shape of truths": (state_dict(tensor(shape=b"(\x88t")), "'w' is no tensor"),
    "a larger shape": (state_dict(tensor(shape=numbers(5))), "does not lie within"),
    "a shape of 2^80": (
        state_dict(tensor(shape=numbers(2**40, 2**40), stride=numbers(0, 0))),
        "does not lie within"),
    "a shape of nothing": (state_dict(tensor(shape=numbers(0))), "does not lie within"),
    "a negative shape": (state_dict(tensor(shape=numbers(-4))), "does not lie within"),
    "a negative offset": (state_dict(tensor(offset=-1)), "does not lie within"),
    "an offset behind the end": (state_dict(tensor(offset=1)), "does not lie within"),
    "a negative stride": (state_dict(tensor(stride=numbers(-1))), "does not lie within"),
    "a larger stride": (state_dict(tensor(stride=numbers(2))), "does not lie within"),
    "a repeated element": (
        state_dict(tensor(shape=numbers(5), stride=numbers(0))), "does not lie within"),
    "more strides than sides": (state_dict(tensor(stride=numbers(1, 1))), "'w' is no tensor"),
    "a shape of 2000 bits": (state_dict(tensor(shape=numbers(2**2000))), "'w' is no tensor"),
    "a thousand dimensions": (
        state_dict(tensor(shape=numbers(*[1] * 1000), stride=numbers(*[1] * 1000))),
        "'w' is no tensor"),
    "a storage of 2^60 numbers": (
        state_dict(tensor(lies_in=storage(numel=2**60))), "it claims|cut short"),
    "a storage that is smaller in the file": (
        state_dict(tensor(lies_in=storage(numel=5))), "its storage '0'"),
    "a storage of negative size": (
        state_dict(tensor(lies_in=storage(numel=-4))), "refers to ['storage'"),
    "a storage that is not there": (
        state_dict(tensor(lies_in=storage(key="1"))), "is missing|its list of storages"),
    "a storage in another folder": (
        state_dict(tensor(lies_in=storage(key="../../0"))), "refers to ['storage'"),
    "a storage of an unknown type": (
        state_dict(tensor(lies_in=storage(kind=named("torch", "device")))),
        "refers to ['storage'"),
    "a storage of another type than before": (
        TWO + b"}" + text("w") + tensor() + b"s" + text("v") + tensor(lies_in=storage(
            kind=named("torch", "DoubleStorage"))) + b"s.", "16 bytes instead of 32|two ways"),
    "a view of a storage": (
        TWO + persistent(text("storage"), FLOATS, text("0"), text("cpu"), number(4),
                         b"(" + text("1") + number(0) + number(4) + b"t") + b".",
        "refers to ['storage'"),
    "a persistent id of another kind": (
        TWO + persistent(text("file"), text("/etc/passwd")) + b".", "refers to ['file'"),
    "a persistent id that is a number": (TWO + b"K\x07Q.", "refers to [7]"),
    "a persistent id without end": (TWO + DEEP + b"Q.", "refers to"),
    "a module without a state": (TWO + CONV + b".", "what it holds is no module"),
    "a module in itself": (
        TWO + CONV + b"q\x01}" + text("_modules") + b"}" + text("m") + b"h\x01s" + b"s"
        + b"".join(text(name) + b"}s" for name in ("_parameters", "_buffers")) + b"b.",
        "its modules contain each other"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_contradicts_itself_is_refused_at_no_cost(
    name: str, write: Write, tmp_path: Path
) -> None:
    body, words = WRONG[name]
    write(tmp_path / "encoder.pkl", body)
    began = time.perf_counter()
    tracemalloc.start()
    message = refusal(tmp_path / "encoder.pkl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any(alternative in message for alternative in words.split("|"))
    assert peak < 64 * 2**20 and time.perf_counter() - began < 10


def nested_modules(depth: int) -> bytes:
    """Modules in modules; the innermost one has no state."""
    begin = CONV + b"}(" + text("_parameters") + b"}" + text("_buffers") + b"}"
    begin += text("_modules") + b"}" + text("m")
    return TWO + begin * depth + CONV + b"sub" * depth + b"."


def test_modules_nested_without_end(write: Write, tmp_path: Path) -> None:
    write(tmp_path / "encoder.pkl", nested_modules(depth=3))
    assert "m.m.m. is no module" in refusal(tmp_path / "encoder.pkl")
    write(tmp_path / "encoder.pkl", nested_modules(depth=5_000))
    assert "endlessly many" in refusal(tmp_path / "encoder.pkl")


def test_many_tensors_in_one_storage_do_not_multiply_it(write: Write, tmp_path: Path) -> None:
    shared = b"".join(text(f"w{i}") + tensor() + b"s" for i in range(4))
    write(tmp_path / "few.pth", TWO + b"}" + shared + b".")
    assert len(read_torch_file(tmp_path / "few.pth")) == 4
    first = b"(" + text("w") + tensor() + b"q\x01"
    again = b"".join(text(f"w{i}") + b"h\x01" for i in range(5_000))
    write(tmp_path / "encoder.pkl", TWO + b"}" + first + again + b"u.")
    assert "it claims 80,016 bytes of weights" in refusal(tmp_path / "encoder.pkl")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data/0": b"12"}, "has 2 bytes instead of 16"),
        ({"data/0": bytes(20)}, "has 20 bytes instead of 16"),
        ({"byteorder": b"big"}, "big-endian"),
        ({"byteorder": bytes(99)}, "has 99 bytes, more than 8"),
        ({"data.pkl": bytes(2 << 20)}, "has 2,097,152 bytes, more than 1,048,576"),
        ({"more/data.pkl": b""}, "it has 2 data.pkl"),
    ],
    ids=["small", "large", "endian", "long", "huge pickle", "two pickles"],
)
def test_entries_of_the_zip(more: dict[str, bytes], words: str, tmp_path: Path) -> None:
    write_zip(tmp_path / "encoder.pkl", state_dict(tensor()), **more)
    assert words in refusal(tmp_path / "encoder.pkl")


@pytest.mark.parametrize(("numel", "words"), [(2**24, "it claims"), (4, "'data/1' is compressed")])
def test_a_zip_that_would_inflate_is_not_inflated(numel: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "encoder.pkl"
    shape = numbers(numel)
    write_zip(path, state_dict(tensor(lies_in=storage(key="1", numel=numel), shape=shape)))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("encoder/data/1", bytes(4 * 2**24))
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    message = refusal(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert words in message and peak < 2**20


def test_a_zip_of_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "encoder.pkl", "w") as archive:
        archive.writestr("README", "not weights")
    assert "it has 0 data.pkl" in refusal(tmp_path / "encoder.pkl")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_bytes_are_refused_or_harmless(
    seed: int, zipped: bool, dalle_encoder: nn.Module, tmp_path: Path
) -> None:
    """Random bytes of the pickle are changed; never anything but weights or a UserError."""
    path, rng = tmp_path / "encoder.pkl", random.Random(seed)
    torch.save(dalle_encoder, path, _use_new_zipfile_serialization=zipped)
    entries, content = {}, path.read_bytes()
    if zipped:
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        content = entries["encoder/data.pkl"]
    refused = 0
    for _ in range(40):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 2, 8))):
            damaged[rng.randrange(min(len(content), 16_000))] = rng.randrange(256)
        if zipped:
            with zipfile.ZipFile(path, "w") as archive:
                for name, value in (entries | {"encoder/data.pkl": bytes(damaged)}).items():
                    archive.writestr(name, value)
        else:
            path.write_bytes(damaged)
        try:
            load_dalle(path)
        except UserError:
            refused += 1
    assert refused > 5


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_refused(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    path = tmp_path / "encoder.pkl"
    for begin in (b"", b"PK\x03\x04", TWO, FOUR, b"".join(old_streams(b"")[:3])):
        path.write_bytes(begin + rng.randbytes(rng.randrange(1, 4000)))
        with pytest.raises(UserError):
            load_dalle(path)
