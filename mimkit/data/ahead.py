"""Shards are brought near before they are read: the next windows, by threads of their own.

What is read does not depend on it: a reader that comes first fetches its shard itself.
"""

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mimkit.data.order import Order
from mimkit.data.remote.catalogue import check_room
from mimkit.data.sources import Source
from mimkit.errors import UserError

Batch = TypeVar("Batch")
_AT_ONCE = 8  # shards that are brought near


class Ahead:
    """Keeps near what a stream of batches will read within two windows.

    Args:
        order: of the stream.
        position: where the stream begins.
        step: positions of a batch of all ranks.
        lead: positions that readers are ahead of the last batch that was given out.
        window: see `Order`.

    Raises:
        UserError: the cache is too small for it.
    """

    def __init__(
        self, *, source: Source, order: Order, position: int, step: int, lead: int, window: int
    ) -> None:
        self._groups, self._order = source.groups, order
        self._position, self._step = position, step
        firsts = self._groups[:-1].tolist()
        self._tars = [source.tar_of(first) for first in firsts]
        in_window = math.ceil(window * len(order) / len(firsts))
        self._span, self._stride = lead + 2 * in_window, max(1, in_window // 2)
        self._most = min(len(firsts), 2 * window + math.ceil(lead * len(firsts) / len(order)))
        why = f"two windows of data.window={window} shards, and what loader processes read ahead"
        check_room(self._tars, num=self._most, why=why)
        self._bringer = Bringer(self._bring_near)

    def follow(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """`batches` as they are."""
        position = due = self._position
        try:
            self._bringer.want(self._coming(position))
            for batch in batches:
                yield batch
                position += self._step
                if position >= due + self._stride:
                    due = position
                    self._bringer.want(self._coming(position))
        finally:
            self._bringer.want([])

    def _coming(self, position: int) -> list[int]:
        found = coming(self._order, self._groups, position=position, span=self._span)
        return [number for number in found[: self._most] if self._tars[number] is not None]

    def _bring_near(self, number: int, again: bool) -> None:
        tar = self._tars[number]
        assert tar is not None
        with contextlib.suppress(UserError):  # who reads it asks again, and hears what is wrong
            tar.bring_near(again=again)


def coming(order: Order, groups: NDArray[np.int64], *, position: int, span: int) -> list[int]:
    """The shards of `span` positions from `position` on, in the order in which they are needed."""
    end, pieces = position + min(span, 2 * len(order)), []
    while position < end:
        epoch, place = divmod(position, len(order))
        pieces.append(order.epoch_order(epoch)[place : place + end - position])
        position += len(pieces[-1])
    samples = np.concatenate(pieces) % groups[-1]
    numbers, first = np.unique(np.searchsorted(groups, samples, "right") - 1, return_index=True)
    return [int(number) for number in numbers[np.argsort(first)]]


class Bringer:
    """Calls `bring(number, again)` for what is wanted, first things first, in a few threads.

    The threads are there while there is something to do. `again`: it was wanted before, too.
    """

    def __init__(self, bring: Callable[[int, bool], None], *, at_once: int = _AT_ONCE) -> None:
        self._bring, self._at_once = bring, at_once
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, bool]] = deque()
        self._wanted, self._busy = set[int](), set[int]()
        self._num_threads = 0

    def want(self, numbers: Sequence[int]) -> None:
        """From now on these; what nobody began is forgotten."""
        with self._lock:
            self._waiting = deque((number, number in self._wanted) for number in numbers)
            self._wanted = set(numbers)
            while self._num_threads < min(self._at_once, len(self._waiting)):
                self._num_threads += 1
                threading.Thread(target=self._work, name="mimkit-ahead", daemon=True).start()

    def _work(self) -> None:
        try:
            while (task := self._take()) is not None:
                self._bring(*task)
                with self._lock:
                    self._busy.discard(task[0])
        except BaseException:
            with self._lock:
                self._num_threads -= 1
            raise

    def _take(self) -> tuple[int, bool] | None:
        with self._lock:
            while self._waiting:
                number, again = self._waiting.popleft()
                if number not in self._busy:
                    self._busy.add(number)
                    return number, again
            self._num_threads -= 1
            return None
