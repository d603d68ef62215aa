"""Shards that can be opened, and those that are open."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimkit.data.manifest import read_classes
from mimkit.errors import UserError

Advise = Callable[[int, int, int, int], None]  # descriptor, offset, length, advice
_ADVISE: Advise | None = getattr(os, "posix_fadvise", None)  # not on macOS


class Tar(ABC):
    """One shard; `str` is its path or address, for messages. Safe to send to other processes."""

    @abstractmethod
    def open(self) -> int:
        """A descriptor to read from.

        Raises:
            UserError: it is not as it was indexed, or cannot be fetched.
            OSError
        """

    @abstractmethod
    def bring_near(self, *, again: bool) -> None:
        """Makes what is soon read quick to read; may take long. Raises UserError.

        Args:
            again: it was asked for before, and is still wanted.
        """

    @property
    def copy(self) -> Path | None:
        """Where it is kept here, if it lies elsewhere."""
        return None

    @property
    @abstractmethod
    def classes(self) -> list[str]:
        """Names of its labels 0, 1, ..., from classes.json beside it; empty where there is none.

        Raises:
            UserError: there is one, and it names no classes.
        """


@dataclass(frozen=True)
class LocalTar(Tar):
    """A file that is read where it lies.

    Args:
        size, mtime_ns: when it was indexed.
        advise: tells the system what will be read; None where it cannot be told.
    """

    path: Path
    size: int
    mtime_ns: int
    advise: Advise | None = _ADVISE

    def __str__(self) -> str:
        return str(self.path)

    def open(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            os.close(descriptor)
            raise UserError(f"{self.path} was changed while it was in use; start again.")
        return descriptor

    def bring_near(self, *, again: bool) -> None:
        if self.advise is None or again:
            return
        with contextlib.suppress(OSError):  # whoever reads it will say what is wrong
            descriptor = self.open()
            try:
                self.advise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)  # 0: to the end
            finally:
                os.close(descriptor)

    @property
    def classes(self) -> list[str]:
        return read_classes(self.path.parent)


class OpenTars:
    """Descriptors by shard, opened when first used; each process has its own.

    The least used are closed, and so are those that have lost their name: a shard that the cache
    evicted takes up the disk until nobody has it open.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._descriptors: OrderedDict[int, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_owner": 0, "_descriptors": OrderedDict()}

    def open(self, number: int, tar: Tar, *, most: int) -> int:
        """The descriptor of shard `number`. Raises UserError and OSError as `tar` does."""
        if self._owner != os.getpid():  # a fork: its parent closes what it opened
            self._owner, self._descriptors = os.getpid(), OrderedDict()
        if number not in self._descriptors:
            descriptor = tar.open()
            self._close(*(n for n, d in self._descriptors.items() if not os.fstat(d).st_nlink))
            self._close(*list(self._descriptors)[: max(0, len(self._descriptors) + 1 - most)])
            self._descriptors[number] = descriptor
        self._descriptors.move_to_end(number)
        return self._descriptors[number]

    def _close(self, *numbers: int) -> None:
        for number in numbers:
            os.close(self._descriptors.pop(number))

    def __del__(self) -> None:
        if self._owner == os.getpid():
            self._close(*self._descriptors)
