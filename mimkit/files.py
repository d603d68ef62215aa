"""Writing files so that a reader sees the whole of them or nothing."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from mimkit.errors import UserError

_TEMPORARY = ".*.tmp"  # as `replacing` and `atomic_folder` name what is not whole yet
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_USERS_OWN = (
    *_FORBIDDEN,
    *_FULL,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)


def is_forbidden(error: OSError) -> bool:
    """Whether the folder cannot be written to at all."""
    return error.errno in _FORBIDDEN


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Puts a file's bytes, or a folder's names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(path: Path, remedy: str | None = None) -> Iterator[None]:
    """Turns a full or read-only disk into a UserError that says where and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number_of(error)
        if number not in _USERS_OWN:
            raise
        usual = "Free some space or choose" if number in _FULL else "Choose"
        raise UserError(
            f"cannot write {path}: {os.strerror(number)}{_free(path, number)}; nothing "
            f"half-written was left. {remedy or f'{usual} another folder.'}"
        ) from error


def _free(path: Path, number: int) -> str:
    """How much is free there, where that is the trouble."""
    if number not in _FULL:
        return ""
    return f" ({free_space(path)[0] // 2**20} MiB free there)"


def free_space(path: Path) -> tuple[int, Path]:
    """Bytes that are free where `path` is or would be, and the folder that is there already."""
    there = next(p for p in [path, *path.absolute().parents] if p.exists())
    return shutil.disk_usage(there).free, there


def _number_of(error: Exception) -> int:
    """errno; safetensors' own writer has it in its message only: "... (os error 28)"."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`; on leaving it is fsynced and renamed into place.

    On any error nothing is left behind. Raises OSError as it comes.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """`replacing` that makes the folder, and says UserError for a full or forbidden disk."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            yield temporary


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Gives a temporary folder beside `path`; on leaving it is fsynced and renamed into place.

    `path` itself must not exist.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.iterdir():
                sync(file)
            sync(temporary)
            temporary.rename(path)
            sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def is_temporary(path: Path) -> bool:
    """Whether it is what a process that was killed here in writing leaves."""
    return path.match(_TEMPORARY)


def remove_temporary(folder: Path) -> None:
    """Clears away what killed processes left; nobody else may be writing to `folder`."""
    for path in folder.glob(_TEMPORARY):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time; the kernel frees the lock when its owner dies."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
