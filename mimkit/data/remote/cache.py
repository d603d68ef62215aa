"""Shards from servers as local files: fetched when they are needed, each by one process at a time.

Beside `NAME.tar` lies `NAME.tar.index.npz`; it outlives the tar, and both belong to one version of
the shard, since NAME holds a hash of its address, its size and its ETag.
"""

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from mimkit.data.index import ShardIndex, index_path, save_index
from mimkit.data.remote.download import PIECE, RemoteShard, checked_index, download
from mimkit.data.remote.locks import locks_in
from mimkit.data.remote.retry import Patience
from mimkit.data.remote.space import Space
from mimkit.data.remote.urls import base_name
from mimkit.errors import UserError
from mimkit.files import disk_errors, sync

REMEDY = (
    "Free some space, set data.cache_gib to less than is free, or data.cache_dir to a folder on "
    "another disk."
)
_TRIES = 2  # downloads of a shard whose bytes turn out wrong
_LONGEST_NAME = 80


@dataclass(frozen=True, kw_only=True)
class ShardCache:
    """The shards that were fetched: one folder for all processes of a machine.

    Args:
        space: the folder, and how much may lie there.
        piece: bytes of one request.
    """

    space: Space
    patience: Patience = field(default_factory=Patience)
    piece: int = PIECE

    def path(self, shard: RemoteShard) -> Path:
        """Where the tar lies while it is cached."""
        file = shard.file
        key = hashlib.blake2b(f"{file.url}\n{file.size}\n{file.version}".encode(), digest_size=16)
        name = re.sub(r"[^\w.-]", "_", base_name(file.url).removesuffix(".tar"), flags=re.ASCII)
        return self.space.folder / f"{name[:_LONGEST_NAME]}.{key.hexdigest()}.tar"

    def index_path(self, shard: RemoteShard) -> Path:
        return index_path(self.path(shard))

    def open(self, shard: RemoteShard, *, indexed: str | None) -> int:
        """A descriptor of the whole tar, which is fetched first if it is not there.

        Args:
            indexed: the `fingerprint` of the index that it is read by; None if there is none yet:
                then it is made and kept.

        Raises:
            UserError: it cannot be fetched, is not what the manifest or the index says, or the
                disk is full.
        """
        path = self.path(shard)
        descriptor = _open_whole(path, shard.file.size)
        if descriptor is not None:
            return descriptor
        with disk_errors(path, REMEDY):
            path.parent.mkdir(parents=True, exist_ok=True)
            with locks_in(path.parent).hold(path.name):
                descriptor = _open_whole(path, shard.file.size)  # somebody fetched it meanwhile
                return self._fetch(shard, indexed) if descriptor is None else descriptor

    def _fetch(self, shard: RemoteShard, indexed: str | None) -> int:
        path = self.path(shard)
        part = self.space.set_aside(path, shard.file.size)
        try:
            index = self._download(shard, part)
            if indexed is None:
                save_index(index, self.index_path(shard))
            elif fingerprint(index) != indexed:
                self.index_path(shard).unlink(missing_ok=True)
                part.unlink()
                raise UserError(
                    f"{shard} does not hold what its index says, so that no image would be found "
                    f"where it should be. Remove {shard}.index.npz, or put the one there that "
                    "tools/make_shards.py wrote with this tar; then start again."
                )
            sync(part)
        except OSError:  # a full disk gets its bytes back
            part.unlink(missing_ok=True)
            raise
        descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
        self.space.complete(part, path)
        return descriptor

    def _download(self, shard: RemoteShard, part: Path) -> ShardIndex:
        """Wrong bytes may have been a fault on the way: they are fetched a second time."""
        for number in range(_TRIES):
            download(shard.file, part, patience=self.patience, piece=self.piece)
            try:
                return checked_index(shard, part)
            except UserError:
                part.unlink()
                if number + 1 == _TRIES:
                    raise
        raise AssertionError("the last try returns or raises")


def fingerprint(index: ShardIndex) -> str:
    """Hash of what lies where in a tar."""
    digest = hashlib.blake2b(digest_size=16)
    for column in (index.keys, index.offsets, index.sizes, index.labels):
        digest.update(column.tobytes())
    return digest.hexdigest()


def _open_whole(path: Path, size: int) -> int | None:
    """A descriptor of `path`, marked as just used; None, and no file, if it is not whole."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if os.fstat(descriptor).st_size != size:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return None
    with contextlib.suppress(PermissionError):  # another user's
        os.utime(descriptor)
    return descriptor
