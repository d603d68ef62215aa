"""One shard from its server to a file: in pieces, resumable, and checked when it is whole."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mimkit.data.index import ShardIndex, make_index
from mimkit.data.manifest import MANIFEST
from mimkit.data.remote.retry import Patience
from mimkit.data.remote.store import RemoteFile, look, read
from mimkit.errors import UserError
from mimkit.files import sha256

PIECE = 16 << 20  # bytes of one request: what a dropped connection costs


@dataclass(frozen=True)
class RemoteShard:
    """A tar on a server, and what manifest.json beside it says of it, if anything."""

    file: RemoteFile
    sha256: str | None = None
    num_samples: int | None = None

    def __str__(self) -> str:
        return str(self.file)


def download(file: RemoteFile, part: Path, *, patience: Patience, piece: int = PIECE) -> None:
    """Completes `part`, which holds the first bytes of `file` or none.

    Raises:
        UserError: the server fails too often, or has another file by now; `part` is then removed.
        OSError: of the disk.
    """
    with part.open("ab") as out:
        while (done := out.tell()) < file.size:
            ask = partial(read, file, done, min(done + piece, file.size))
            try:
                content = patience.insist(ask, what=f"fetching {file}")
            except UserError:
                _check_same(file, part, patience)  # a shorter file in its place fails like this
                raise
            out.write(content)
            out.flush()  # a killed process leaves what it has
    _check_same(file, part, patience)


def _check_same(file: RemoteFile, part: Path, patience: Patience) -> None:
    """UserError where the server has another file by now; `part` is then removed."""
    now = patience.insist(partial(look, file.url), what=f"looking at {file}")
    if now != file:
        part.unlink()  # it may be half of the one and half of the other
        raise UserError(
            f"{file} was replaced on its server while it was in use: it was version "
            f"{file.version or 'unknown'} of {file.size} bytes, now it is "
            f"{now.version or 'unknown'} of {now.size}. Start again, with the new one."
        )


def checked_index(shard: RemoteShard, path: Path) -> ShardIndex:
    """The index of the tar that was fetched to `path`.

    Raises:
        UserError: SHA-256 or number of samples are not what the manifest says, or the tar is
            damaged; see `make_index`.
    """
    if shard.sha256 is not None and (found := sha256(path)) != shard.sha256:
        raise UserError(
            f"bad checksum: {shard} has SHA-256 {found}, but {MANIFEST} beside it says "
            f"{shard.sha256}. Put the right file there, or correct the manifest."
        )
    try:
        index = make_index(path)
    except UserError as error:
        raise UserError(str(error).replace(str(path), str(shard))) from error
    if shard.num_samples not in (None, len(index)):
        raise UserError(
            f"{shard} holds {len(index)} images, but {MANIFEST} beside it says "
            f"{shard.num_samples} samples. Put the right file there, or correct the manifest."
        )
    return index
