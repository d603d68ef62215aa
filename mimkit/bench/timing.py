"""CPU time of things that are compared.

CPU time, so that waiting for a core does not count; in turns, so that what other load does enter
(it empties the caches, which can cost a third) is the same for all. A comparison is the median over
rounds of the ratio within a round.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

Item = TypeVar("Item")
cpu_seconds = time.process_time  # of all threads of this process
_TURN = 20  # items


class Spread(NamedTuple):
    """A number that was measured once a round."""

    median: float
    least: float
    most: float


def spread(values: Iterable[float]) -> Spread:
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread, as in a loader process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def take_turns(
    works: Mapping[str, Callable[[Item], object]],
    items: Sequence[Item],
    *,
    rounds: int,
    done: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """CPU seconds of each work over all items, in each round; `done` is called after a round.

    A turn is a few items, some hundredths of a second, so that what else the machine does while
    they are measured is the same for all. Nothing that a work returns is kept.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        totals = dict.fromkeys(works, 0.0)
        for first in range(0, len(items), _TURN):
            for name, work in works.items():
                before = cpu_seconds()
                for item in items[first : first + _TURN]:
                    work(item)
                totals[name] += cpu_seconds() - before
        for name, total in totals.items():
            seconds[name].append(total)
        done()
    return seconds


def race(
    works: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    clock: Callable[[Callable[[], object]], float],
    done: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each work in each round, after one of each that warms up.

    Every round starts with another work, so that none always follows the same one. `done` is called
    after each work.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(-1, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            took = clock(works[name])
            done()
            if number >= 0:
                seconds[name].append(took)
    return seconds


def ratios(one: Sequence[float], other: Sequence[float]) -> Spread:
    """Of two things that were timed in the same rounds: median, least and most."""
    return spread(above / below for above, below in zip(one, other, strict=True))


def cpu_clock(work: Callable[[], object]) -> float:
    """Seconds of CPU time of this process."""
    before = cpu_seconds()
    work()
    return cpu_seconds() - before


def cuda_clock(work: Callable[[], object]) -> float:
    """Seconds between two events on the GPU, which has nothing else to do then."""
    before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    before.record()  # type: ignore[no-untyped-call]
    work()
    after.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / 1000  # type: ignore[no-untyped-call]


def clock_of(device: torch.device) -> Callable[[Callable[[], object]], float]:
    return cuda_clock if device.type == "cuda" else cpu_clock
