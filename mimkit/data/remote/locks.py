"""Locks by name in a folder, between processes and between the threads of one."""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PAUSE = 0.05  # seconds until a lock is asked for again


class FolderLocks:
    """`NAME.lock` in a folder; the kernel frees it when its owner dies.

    lockf, not flock: loader processes that are forked while something is fetched would inherit
    that, and hold it when its owner is long dead. But lockf knows no threads, and closing a file
    that is open twice in a process frees its lock; so a thread must first own the name here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process, self._owners = os.getpid(), dict[str, threading.Lock]()

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Waits until nobody else holds `name`.

        Who holds one may wait for another only if nobody waits in the opposite order.

        Raises:
            OSError
        """
        with self._owner(name), self._opened(name) as descriptor:
            _wait(descriptor)
            yield

    @contextlib.contextmanager
    def try_hold(self, name: str) -> Iterator[bool]:
        """Gives whether it was free; if so it is held inside. Raises OSError."""
        owner = self._owner(name)
        if not owner.acquire(blocking=False):
            yield False
            return
        try:
            with self._opened(name) as descriptor:
                yield _is_free(descriptor)
        finally:
            owner.release()

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path = self._folder / f"{name}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _owner(self, name: str) -> threading.Lock:
        if self._process != os.getpid():  # after a fork; who held what here lives in the parent
            self._process, self._owners = os.getpid(), {}
        return self._owners.setdefault(name, threading.Lock())


def _wait(descriptor: int) -> None:
    """The kernel takes processes whose threads wait for each other's threads for a deadlock."""
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            return
        except OSError as error:
            if error.errno != errno.EDEADLK:
                raise
        time.sleep(_PAUSE)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except PermissionError:  # POSIX allows both answers
        return False
    return True


@cache
def locks_in(folder: Path) -> FolderLocks:
    """The locks of `folder`; one object in a process, for threads to meet at."""
    return FolderLocks(folder)
