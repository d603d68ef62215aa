"""A study's jobs on its slots, so many at a time; and how all end when it is asked to stop."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from multiprocessing.context import ForkServerContext, SpawnContext
from queue import SimpleQueue
from threading import Lock
from typing import TypeVar

from typing_extensions import Self

from mimkit.ablation.machine import Slot
from mimkit.ablation.processes import Attempt, Ended, Job, start
from mimkit.errors import Interrupted
from mimkit.interrupts import StopRequests

GRACE = 60.0  # seconds that jobs have to save and leave before they are killed
_LOOK = 0.2  # seconds between two looks whether somebody asked to stop
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


class ClosedError(Exception):
    """The study was asked to stop: this job was not started, or not finished."""


class Pool:
    """Inside `with`, signals that ask to stop are noted; see `StopRequests` for a second Ctrl-C.

    Args:
        slots: one job at a time on each.
        say: told what happens to the jobs when the study is asked to stop.
        describe: how far the study is, for whoever asked it to stop.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        context: ForkServerContext | SpawnContext,
        *,
        say: Callable[[str], object],
        describe: Callable[[], str],
    ) -> None:
        self._context, self._say, self._describe = context, say, describe
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._threads = ThreadPoolExecutor(len(slots))
        self._asked = StopRequests()
        self._living: list[Attempt] = []
        self._door, self._closed = Lock(), False  # nothing starts once it is closed
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        self._exit.enter_context(self._asked)
        self._exit.enter_context(self._threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def map(self, work: Callable[[_Given], _Made], given: Sequence[_Given]) -> list[_Made]:
        """`work` of each in a thread for each slot; `work` calls `live`.

        Raises:
            Interrupted: the study was asked to stop; its jobs have ended, by themselves if they did
                so within GRACE.
        """
        futures = [self._threads.submit(work, one) for one in given]
        left = set(futures)
        try:
            while left:
                done, left = wait(left, timeout=_LOOK, return_when=FIRST_EXCEPTION)
                if self._asked.asked():
                    break
                for future in done:
                    future.result()
        except BaseException:
            self._end(futures)
            raise
        if self._asked.signal is not None:
            killed = self._end(futures)
            raise Interrupted(self._asked.signal, self._describe() + killed)
        return [future.result() for future in futures]

    def live(self, job_in: Callable[[Slot], Job]) -> Ended:
        """A job from its start to its end, on the first slot that is free.

        Raises:
            ClosedError: the study was asked to stop before.
        """
        slot = self._free.get()
        try:
            with self._door:
                if self._closed:
                    raise ClosedError
                attempt = start(job_in(slot), self._context, slot.environment)
                self._living.append(attempt)
            try:
                return attempt.wait()
            finally:
                self._living.remove(attempt)
        finally:
            self._free.put(slot)

    @property
    def closed(self) -> bool:
        """Whether nothing starts any more."""
        return self._closed

    def _end(self, futures: "Sequence[Future[_Made]]") -> str:
        """Of all jobs, and says how many had to be killed."""
        with self._door:
            self._closed = True
            living = list(self._living)
        for future in futures:
            future.cancel()
        if living:
            again = "; Ctrl-C again leaves at once" if self._asked.signal == "SIGINT" else ""
            self._say(f"no run starts any more; those at work ({len(living)}) save and leave, or "
                      f"are killed after {GRACE:.0f} s{again}")  # fmt: skip
        for attempt in living:
            attempt.process.terminate()
        wait(futures, timeout=GRACE)
        late = list(self._living)
        for attempt in late:
            attempt.process.kill()
        wait(futures)
        return f"; {len(late)} had to be killed after {GRACE:.0f} s" if late else ""
