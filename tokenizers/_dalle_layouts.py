"""The two layouts of torch.save: a zip (torch 1.6 and newer), and streams in a row (older).

Every size that a file states is compared with the file's own before anything is read or allocated.
"""

import struct
import zipfile
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from mimkit.tokenizers._dalle_pickle import Name, RefusedError, read_pickle
from mimkit.tokenizers._dalle_tree import KNOWN, Claim, Storage, claims, refer

ZIP, PICKLE = b"PK\x03\x04", b"\x80"  # how the files of the two layouts begin

_LONGEST_PICKLE = 1 << 20  # bytes; those of DALL-E have 30 to 60 KB
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of the older layout
_DAMAGED = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError,
            struct.error, OverflowError, OSError)  # fmt: skip

Fetch = Callable[[Storage], bytes]


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of torch.save, by name, in the precision they have there.

    Raises:
        RefusedError: see `read_pickle`, `claims`; or the file is cut short or contradicts itself.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            if file.read(len(ZIP)) != ZIP:
                return _cut(*_old_layout(file, size), size=size)
            with zipfile.ZipFile(file) as archive:
                return _cut(*_zip_layout(archive, size), size=size)
    except _DAMAGED as error:
        raise RefusedError(f"it is damaged or cut short ({str(error)[:100]})") from error


def _zip_layout(archive: zipfile.ZipFile, size: int) -> tuple[dict[str, Claim], Fetch]:
    entries = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise RefusedError(
            f"it is a zip archive, but not one of torch.save: it has {len(pickles)} data.pkl"
        )
    folder = pickles[0].removesuffix("data.pkl")

    def read(name: str, longest: int) -> bytes:
        entry = entries.get(folder + name)
        if entry is None:
            raise RefusedError(f"its entry '{name}' is missing")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > longest:
            raise RefusedError(
                f"its entry '{name}' is compressed or has {entry.file_size:,} bytes, more than "
                f"{longest:,}"
            )
        return archive.read(entry)

    if f"{folder}byteorder" in entries and read("byteorder", 8) != b"little":
        raise RefusedError("its numbers are big-endian")
    stream = BytesIO(read("data.pkl", _LONGEST_PICKLE))
    root = read_pickle(stream, known=KNOWN, refer=refer)
    return claims(root), lambda storage: read(f"data/{storage.key}", size)


def _old_layout(file: BinaryIO, size: int) -> tuple[dict[str, Claim], Fetch]:
    """Pickles of a magic number, a version, the system, the object, the keys; then the storages."""
    file.seek(0)
    stream = BytesIO(file.read(_LONGEST_PICKLE))
    storages: dict[str, Storage] = {}

    def remember(persistent_id: object) -> Name | Storage:
        found = refer(persistent_id)
        if isinstance(found, Storage) and storages.setdefault(found.key, found) != found:
            raise RefusedError(f"its storage '{found.key}' is described in two ways")
        return found

    def read() -> object:
        return read_pickle(stream, known=KNOWN, refer=remember)

    if read() != _MAGIC or read() != _VERSION:
        raise RefusedError("it is a pickle, but not one of torch.save")
    system = read()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise RefusedError("its numbers are big-endian")
    found, keys = claims(read()), read()
    listed = [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
    if sorted(listed) != sorted(storages):
        raise RefusedError("its list of storages is not that of its pickle")
    file.seek(stream.tell())
    places = _places(file, [storages[key] for key in listed], size)

    def fetch(storage: Storage) -> bytes:
        file.seek(places[storage.key])
        return file.read(storage.nbytes)

    return found, fetch


def _places(file: BinaryIO, storages: Iterable[Storage], size: int) -> dict[str, int]:
    """Where each storage begins: behind its number of elements, in 64 bits."""
    places = {}
    for storage in storages:
        numel = int.from_bytes(file.read(8), "little", signed=True)
        places[storage.key] = file.tell()
        if numel != storage.numel or file.tell() + storage.nbytes > size:
            raise RefusedError(
                f"it is damaged or cut short: its storage '{storage.key}' should have "
                f"{storage.numel:,} numbers"
            )
        file.seek(storage.nbytes, 1)
    return places


def _cut(found: dict[str, Claim], fetch: Fetch, *, size: int) -> dict[str, Tensor]:
    """The claimed tensors, copied out of their storages, each of which is read once."""
    by_storage: dict[Storage, dict[str, Claim]] = {}
    for name, claim in found.items():
        by_storage.setdefault(claim.storage, {})[name] = claim
    for what in (found.values(), by_storage):
        if (claimed := sum(item.nbytes for item in what)) > size:
            raise RefusedError(
                f"it claims {claimed:,} bytes of weights and has {size:,} bytes in all"
            )
    tensors = {}
    for storage, cuts in by_storage.items():
        flat = _flat(storage, fetch(storage))
        for name, cut in cuts.items():
            view = flat.as_strided(cut.shape, cut.stride, cut.offset)
            tensors[name] = view.clone(memory_format=torch.contiguous_format)
    return tensors


def _flat(storage: Storage, data: bytes) -> Tensor:
    if len(data) != storage.nbytes:
        raise RefusedError(
            f"its storage '{storage.key}' has {len(data):,} bytes instead of {storage.nbytes:,}"
        )
    return torch.frombuffer(bytearray(data), dtype=storage.dtype)
