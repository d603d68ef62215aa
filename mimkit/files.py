"""Writing files so that a reader sees the whole of them or nothing."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mimkit.errors import UserError


def sync(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full or read-only disk into a UserError that says where and how much is free."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG):
            raise
        folder = next(p for p in [path, *path.parents] if p.exists())
        free = shutil.disk_usage(folder).free // 2**20
        raise UserError(
            f"cannot write {path}: {error.strerror} ({free} MiB free there); nothing half-written "
            "was left. Free some space or choose another folder"
        ) from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`; on leaving it is fsynced and renamed into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


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
            temporary.rename(path)
            sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
