"""What lies in a shard and where, kept in a file beside it so that it is scanned only once."""

import hashlib
import zipfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimkit.data._members import image_member, label_of, no_image
from mimkit.data.manifest import check_shard
from mimkit.data.tar import scan_tar
from mimkit.files import disk_errors, is_forbidden, replacing

VERSION = 1


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
    name = hashlib.blake2b(str(shard.absolute()).encode(), digest_size=16).hexdigest() + ".npz"
    beside, cached = index_path(shard), cache_dir / "index" / name
    for path in (beside, cached):
        index = _read_index(path, shard)
        if index is not None:
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


def make_index(shard: Path) -> ShardIndex:
    """Scans `shard`; nothing is written. Raises UserError as `load_index` does."""
    status = shard.stat()
    groups = groupby(scan_tar(shard), key=lambda member: member.key)
    samples = [{member.extension: member for member in group} for _, group in groups]
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


def _read_index(path: Path, shard: Path) -> ShardIndex | None:
    """None where there is no index, where it is damaged, or where the shard has changed since."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file):  # np.load leaks a damaged file
            file.seek(0)
            arrays = np.load(file, allow_pickle=False)
            fields: dict[str, Any] = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    wanted = {*ShardIndex.__dataclass_fields__, "version"}
    if set(fields) != wanted or int(fields.pop("version")) != VERSION:
        return None
    fields |= {name: int(value) for name, value in fields.items() if value.ndim == 0}
    index = ShardIndex(**fields)
    status = shard.stat()
    fresh = (index.tar_size, index.tar_mtime_ns) == (status.st_size, status.st_mtime_ns)
    return index if fresh else None
