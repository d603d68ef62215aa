"""What lies beside shards on their server: manifest.json, classes.json, an index for each."""

import io
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mimkit.data._members import IMAGE_EXTENSIONS
from mimkit.data.index import ShardIndex, read_index
from mimkit.data.manifest import CLASSES, MANIFEST, parse_classes, parse_manifest
from mimkit.data.remote.download import RemoteShard
from mimkit.data.remote.retry import Patience
from mimkit.data.remote.store import RemoteFile, read_whole
from mimkit.data.remote.urls import base_name, beside, shown
from mimkit.files import replacing

_LONGEST = 256 << 20  # bytes of one of them; an index has about 60 a sample
_COLUMNS = {"keys": "S", "extensions": "S", "offsets": "i", "sizes": "i", "labels": "i"}


@dataclass(frozen=True)
class RemoteFolder:
    """What is said of the shards of a folder, where somebody put it there."""

    manifest: dict[str, dict[str, Any]]  # by file name
    classes_json: bytes | None  # None where there is none
    classes_at: str

    @property
    def classes(self) -> list[str]:
        """Empty where there is no classes.json; UserError where it names no classes."""
        return parse_classes(self.classes_json, where=self.classes_at)

    def describe(self, file: RemoteFile) -> RemoteShard:
        entry = self.manifest.get(base_name(file.url), {})
        sha256, samples = entry.get("sha256"), entry.get("samples")
        return RemoteShard(
            file,
            sha256=sha256.lower() if isinstance(sha256, str) else None,
            num_samples=samples if isinstance(samples, int) else None,
        )


def read_folder(url: str, *, patience: Patience) -> RemoteFolder:
    """Of the shard `url`. Raises UserError where the server fails too often, or the manifest is
    no JSON."""
    found = _read(beside(url, MANIFEST), patience)
    entries = parse_manifest(found, where=shown(beside(url, MANIFEST))).get("shards")
    named = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
    return RemoteFolder(
        manifest={str(entry.get("shard")): entry for entry in named},
        classes_json=_read(beside(url, CLASSES), patience),
        classes_at=shown(beside(url, CLASSES)),
    )


def fetch_index(shard: RemoteShard, path: Path, *, patience: Patience) -> ShardIndex | None:
    """`SHARD.index.npz`, kept at `path`; None where there is none that may be the shard's.

    That it is the shard's is proven when the tar itself is fetched.

    Raises:
        UserError: the server fails too often.
        OSError: of the disk.
    """
    url = beside(shard.file.url, base_name(shard.file.url) + ".index.npz")
    content = _read(url, patience)
    if content is None or not _is_plain_zip(content):
        return None
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return kept_index(shard, path)


def kept_index(shard: RemoteShard, path: Path) -> ShardIndex | None:
    """The index of `shard` at `path`; None where there is none, or it cannot be the shard's."""
    index = read_index(path)
    return index if index is not None and _may_be_of(shard.file, index) else None


def _may_be_of(file: RemoteFile, index: ShardIndex) -> bool:
    columns = [getattr(index, name) for name in _COLUMNS]
    if not all(isinstance(column, np.ndarray) for column in columns):
        return False
    kinds = [column.dtype.kind for column in columns]
    shapes = {column.shape for column in columns}
    if kinds != list(_COLUMNS.values()) or shapes != {(len(index),)} or not len(index):
        return False
    room = file.size - index.offsets
    return (
        index.tar_size == file.size
        and bool(((index.offsets >= 0) & (index.sizes >= 0) & (index.sizes <= room)).all())
        and set(index.extensions.tolist()) <= {name.encode() for name in IMAGE_EXTENSIONS}
    )


def _read(url: str, patience: Patience) -> bytes | None:
    ask = partial(read_whole, url, limit=_LONGEST)
    return patience.insist(ask, what=f"fetching {shown(url)}")


def _is_plain_zip(content: bytes) -> bool:
    """As numpy writes it; a compressed one may unpack to any size."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError):
        return False
