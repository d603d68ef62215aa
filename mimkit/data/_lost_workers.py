"""Loader processes that are killed: what torch raises then, as an error that a user can mend."""

import re
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from mimkit.errors import UserError

Outcome = TypeVar("Outcome")
_MOMENT = 2.0  # seconds
_Handler = Callable[[int, FrameType | None], Any]


def told_of_lost_workers(loader: "DataLoader[Outcome]") -> Iterator[Outcome]:
    """Starts the workers; gives what they make.

    Raises:
        UserError: one was killed. Here, or wherever the main thread is: torch raises out of a
            handler of SIGCHLD, lest it wait for a worker that is gone.
    """
    outcomes = iter(loader)
    return _given(outcomes, _watch())


class _Watch:
    """torch's handler of SIGCHLD, in our words; each worker is told once."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler
        self._told: set[int] = set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except RuntimeError as error:
            lost = _lost(error)
            if not lost:
                raise
            if not self._told.issuperset(lost):
                raise self.said(lost) from error

    def said(self, lost: set[int]) -> UserError:
        self._told |= lost
        return _explained(lost)


def _watch() -> _Watch | None:
    """The one that this process has; None where torch has no handler (workers were never started
    from the main thread)."""
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, _Watch):
        return handler
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return None
    watch = _Watch(handler)
    signal.signal(signal.SIGCHLD, watch)
    return watch


def _given(outcomes: Iterator[Outcome], watch: _Watch | None) -> Iterator[Outcome]:
    while True:
        try:
            outcome = next(outcomes)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            lost = _lost(error) if isinstance(error, RuntimeError) else _ended(outcomes)
            if not lost:
                raise
            raise (_explained(lost) if watch is None else watch.said(lost)) from error
        yield outcome


def _lost(error: RuntimeError) -> set[int]:
    """The workers that it is about."""
    found = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", str(error))
    return set() if found is None else {int(pid) for pid in found[1].split(",")}


def _ended(outcomes: Any) -> set[int]:
    """The workers of torch's iterator that are gone: a batch of theirs may be cut off before it is
    known that they are."""
    pids = {worker.sentinel: worker.pid for worker in getattr(outcomes, "_workers", ())}
    ready = connection.wait(list(pids), _MOMENT)
    return {pid for sentinel, pid in pids.items() if sentinel in ready}


def _explained(lost: set[int]) -> UserError:
    return UserError(
        f"a process that loads images (pid {', '.join(map(str, sorted(lost)))}) was killed: by "
        "hand, or because memory ran out (dmesg tells). A training or a bank goes on where it was "
        "by the same command; fewer of these processes (engine.workers, or --workers) take less "
        "memory"
    )
