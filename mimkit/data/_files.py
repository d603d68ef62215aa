"""Writing files so that what has its final name is whole."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mimkit.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def is_forbidden(error: OSError) -> bool:
    """Whether the folder cannot be written to at all."""
    return error.errno in _FORBIDDEN


@contextmanager
def disk_errors(folder: Path, remedy: str) -> Iterator[None]:
    """A full disk, a read-only folder and the like, as one paragraph that names the way out."""
    try:
        yield
    except OSError as error:
        what = "the disk is full" if error.errno in _FULL else (error.strerror or str(error))
        raise UserError(f"cannot write to {folder}: {what}. {remedy}") from error


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """`write` fills a temporary neighbour, which gets the name `path` only when it is on disk.

    On any error nothing is left behind.
    """
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp's 0600 would hide shards from colleagues
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_temporary(folder: Path) -> None:
    """Clears away what killed processes left; nobody else may be writing to `folder`."""
    for path in folder.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Puts the names in `folder` on disk, not only the bytes of the files."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time; the kernel frees the lock when its owner dies."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
