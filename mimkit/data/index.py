"""What lies in a shard and where, kept in a file beside it so that it is scanned only once."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimkit.data._members import image_member, label_of, no_image
from mimkit.data.manifest import check_shard
from mimkit.data.tar import samples_of, scan_tar
from mimkit.files import disk_errors, is_forbidden, replacing

VERSION = 2  # 2: labels under `class` in .json
_NUMBERS = ("num_without_image", "tar_size", "tar_mtime_ns")  # all else has one entry a sample


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The samples of one shard, in the order in which they lie there; arrays have one entry each.

    Attributes:
        keys, extensions: UTF-8 bytes.
        offsets, sizes: of the encoded image, in bytes.
        labels: NO_LABEL where there is none.
        num_without_image: keys in the tar that have no member with an image's extension.
        tar_size, tar_mtime_ns: of the tar when it was scanned; others mean that it changed.
    """

    keys: NDArray[np.bytes_]
    extensions: NDArray[np.bytes_]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_without_image: int
    tar_size: int
    tar_mtime_ns: int

    def __len__(self) -> int:
        return len(self.keys)


def load_index(shard: Path, *, cache_dir: Path) -> ShardIndex:
    """The index of `shard`: read if it is there and fresh, else made and kept.

    It lies in `SHARD.index.npz`, or below `cache_dir`/index where that folder is read-only. When
    it is made and a manifest.json beside the shard names it, its SHA-256 is checked too.

    Raises:
        UserError: what `scan_tar` raises; no image in the shard; a label that is no number; another
            checksum or number of samples than the manifest says; no place to write the index.
    """
    beside, cached = index_paths(shard, cache_dir=cache_dir)
    for path in (beside, cached):
        index = read_index(path)
        if index is not None and is_fresh(index, shard):
            return index
    index = make_index(shard)
    check_shard(shard, num_samples=len(index))
    with disk_errors(cached.parent, "Free space, or set data.cache_dir to a folder of yours."):
        try:
            save_index(index, beside)
        except OSError as error:
            if not is_forbidden(error):
                raise
            cached.parent.mkdir(parents=True, exist_ok=True)
            save_index(index, cached)
    return index


def index_path(shard: Path) -> Path:
    """The name of the index beside `shard`."""
    return shard.with_name(shard.name + ".index.npz")


def index_paths(shard: Path, *, cache_dir: Path) -> tuple[Path, Path]:
    """The two places of an index: beside `shard`, and below `cache_dir`."""
    name = hashlib.blake2b(str(shard.absolute()).encode(), digest_size=16).hexdigest() + ".npz"
    return index_path(shard), cache_dir / "index" / name


def make_index(shard: Path) -> ShardIndex:
    """Scans `shard`; nothing is written. Raises UserError as `load_index` does."""
    status = shard.stat()
    samples = samples_of(scan_tar(shard))
    with shard.open("rb", buffering=0) as file:
        found = [(image_member(s), label_of(s, fd=file.fileno(), shard=shard)) for s in samples]
    images = [(image, label) for image, label in found if image is not None]
    if not images:
        raise no_image(shard, samples)
    return ShardIndex(
        keys=np.array([image.key.encode() for image, _ in images], np.bytes_),
        extensions=np.array([image.extension.encode() for image, _ in images], np.bytes_),
        offsets=np.array([image.offset for image, _ in images], np.int64),
        sizes=np.array([image.size for image, _ in images], np.int64),
        labels=np.array([label for _, label in images], np.int64),
        num_without_image=len(samples) - len(images),
        tar_size=status.st_size,
        tar_mtime_ns=status.st_mtime_ns,
    )


def save_index(index: ShardIndex, path: Path) -> None:
    """Writes `index` whole or not at all. Raises OSError."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, version=np.int64(VERSION), **vars(index))


def read_index(path: Path) -> ShardIndex | None:
    """The index at `path`, fresh or not; None where there is none, a damaged or an older one."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file):  # np.load leaks a damaged file
            file.seek(0)
            arrays = np.load(file, allow_pickle=False)
            fields: dict[str, Any] = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    wanted = {*ShardIndex.__dataclass_fields__, "version"}
    if set(fields) != wanted or fields.pop("version").tolist() != VERSION:
        return None
    numbers = {name: int(fields[name]) for name in _NUMBERS if fields[name].ndim == 0}
    columns = {value.shape for name, value in fields.items() if name not in _NUMBERS}
    if len(numbers) < len(_NUMBERS) or len(columns) != 1 or len(*columns) != 1:
        return None
    return ShardIndex(**fields | numbers)


def is_fresh(index: ShardIndex, shard: Path) -> bool:
    """Whether `shard` has the size and the time of change that it had when it was indexed."""
    status = shard.stat()
    return (index.tar_size, index.tar_mtime_ns) == (status.st_size, status.st_mtime_ns)
