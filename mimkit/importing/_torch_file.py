"""A file of torch.save that holds a training script's whole checkpoint: the weights in it, as data.

The tokenizers' restricted reader does the reading: nothing is imported, looked up or called. It
knows files of floating-point weights; here are also index buffers, and what scripts save besides
(arguments, counters, an optimizer), which stays inert and is left behind.
"""

import struct
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from mimkit.errors import UserError
from mimkit.tokenizers._dalle_layouts import ZIP, read_torch_file
from mimkit.tokenizers._dalle_pickle import ORDERED_DICT, Made, Name, RefusedError, read_pickle
from mimkit.tokenizers._dalle_tree import KNOWN, Claim, Storage, claims, refer

# Under which name scripts save the weights: MAE, DeiT, BEiT; DeepSpeed; Lightning; DINO.
WRAPPERS = ("model", "module", "state_dict", "teacher")

_WHOLE_NUMBERS = {
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
_BESIDES = (
    "argparse Namespace", "collections defaultdict", "pathlib PosixPath", "torch Size",
    "numpy.core.multiarray scalar", "numpy._core.multiarray scalar", "numpy dtype",
    "_codecs encode",
)  # fmt: skip
_TENSORS = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
_LONGEST_PICKLE = 4 << 20  # bytes; ViT-L with AdamW's state has 0.3 MiB
_ZIP_HEADER = struct.Struct("<26xHH")  # of an entry: lengths of what stands behind it
_DAMAGED = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)


def read_torch(path: Path) -> tuple[str, dict[str, Tensor]]:
    """Under which name the weights stood ("" if under none), and the weights.

    Raises:
        UserError: the file is damaged, holds no weights, or its pickle asks for anything that no
            training script of the kind saves; nothing of it was executed.
    """
    size = path.stat().st_size
    if _is_zip(path) and not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not complete: {_shortage(path, size)}; fetch it again")
    try:
        if not _is_zip(path):
            return "", read_torch_file(path)  # before torch 1.6
        with zipfile.ZipFile(path) as archive:
            return _read_zip(archive, size)
    except (RefusedError, *_DAMAGED) as error:
        raise UserError(
            f"{path} was not read, and nothing in it was executed: {str(error)[:200]}. Expected is "
            "torch.save of a dictionary of tensors, alone or under one of "
            f"{', '.join(WRAPPERS)}; where you trust the file, write its state_dict with "
            "safetensors.torch.save_file and give that"
        ) from error


def _read_zip(archive: zipfile.ZipFile, size: int) -> tuple[str, dict[str, Tensor]]:
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise RefusedError(f"it is a zip with {len(pickles)} data.pkl, so not one of torch.save")
    folder = pickles[0].removesuffix("data.pkl")

    def read(name: str, longest: int) -> bytes:
        entry = archive.getinfo(folder + name)
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > longest:
            raise RefusedError(f"its entry '{name}' is compressed or longer than {longest:,} bytes")
        return archive.read(entry)

    try:
        if f"{folder}byteorder" in archive.namelist() and read("byteorder", 8) != b"little":
            raise RefusedError("its numbers are big-endian")
        wrapper, tensors = _weights_of(_root(read("data.pkl", _LONGEST_PICKLE)))
        return wrapper, _cut(claims(tensors), lambda at: read(f"data/{at.key}", size), size=size)
    except KeyError as error:
        raise RefusedError(f"an entry is missing: {error}") from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return bool(file.read(len(ZIP)) == ZIP)


def _root(pickled: bytes) -> object:
    known = KNOWN.union(_WHOLE_NUMBERS, _BESIDES)
    root: object = read_pickle(BytesIO(pickled), known=known, refer=_refer)
    return root


def _shortage(path: Path, size: int) -> str:
    """How much is missing of a zip without its end, by the pickle that torch writes first."""
    with path.open("rb") as file:
        header = file.read(_ZIP_HEADER.size)
        if len(header) < _ZIP_HEADER.size:
            return f"it has {size:,} bytes"
        file.seek(sum(_ZIP_HEADER.unpack(header)), 1)  # the entry's name, and padding
        try:
            _, tensors = _weights_of(_root(file.read(_LONGEST_PICKLE)))
            storages = {claim.storage for claim in claims(tensors).values()}
        except (RefusedError, *_DAMAGED):
            return f"it has {size:,} bytes, and the table of contents at its end is missing"
    least = sum(storage.nbytes for storage in storages)
    return f"it has {size:,} bytes, its weights alone are {least:,}, and its end is missing"


def _refer(persistent_id: object) -> Name | Storage:
    match persistent_id:
        case ("storage", Name(kind), key, place, numel, *rest) if kind in _WHOLE_NUMBERS:
            checked = refer(("storage", Name("torch FloatStorage"), key, place, numel, *rest))
            assert isinstance(checked, Storage)
            return Storage(checked.key, _WHOLE_NUMBERS[kind], checked.numel)
    referred: Name | Storage = refer(persistent_id)
    return referred


def _weights_of(root: object) -> tuple[str, dict[str, object]]:
    """What the root holds itself, else under one of the wrappers, perhaps one in another."""
    entries = _entries(root)
    if tensors := _only_tensors(entries):
        return "", tensors
    for wrapper in WRAPPERS:
        if wrapper in entries:
            inner, tensors = _weights_of(entries[wrapper])
            return ".".join(filter(None, (wrapper, inner))), tensors
    raise RefusedError(f"it holds no tensors; its names are {', '.join(map(str, entries))[:100]}")


def _entries(value: object) -> Mapping[str | int, object]:
    if isinstance(value, Made) and value.name == ORDERED_DICT:
        value = value.entries
    if not isinstance(value, dict):
        raise RefusedError("what it holds is no dictionary")
    return value


def _only_tensors(entries: Mapping[str | int, object]) -> dict[str, object]:
    return {str(name): value for name, value in entries.items()
            if isinstance(value, Made) and value.name in _TENSORS}  # fmt: skip


def _cut(
    found: Mapping[str, Claim], read: Callable[[Storage], bytes], *, size: int
) -> dict[str, Tensor]:
    """The claimed tensors, copied out of their storages, each of which is read once."""
    by_storage: dict[Storage, dict[str, Claim]] = {}
    for name, claim in found.items():
        by_storage.setdefault(claim.storage, {})[name] = claim
    stored = sum(storage.nbytes for storage in by_storage)
    claimed = sum(claim.nbytes for claim in found.values())
    if stored > size or claimed > 2 * size:  # twice: heads that share a weight both claim it
        raise RefusedError(
            f"it claims {max(stored, claimed):,} bytes of weights and has {size:,} in all"
        )
    tensors = {}
    for storage, cuts in by_storage.items():
        data = read(storage)
        if len(data) != storage.nbytes:
            raise RefusedError(f"storage '{storage.key}' has {len(data)} of {storage.nbytes} bytes")
        flat = torch.frombuffer(bytearray(data), dtype=storage.dtype)
        for name, cut in cuts.items():
            view = flat.as_strided(cut.shape, cut.stride, cut.offset)
            tensors[name] = view.clone(memory_format=torch.contiguous_format)
    return tensors
