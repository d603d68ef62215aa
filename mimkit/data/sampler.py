"""Which samples make up the micro-batches of one rank: arithmetic on positions, no state."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch.utils.data import Sampler

from mimkit.data.order import Order


class Slot(NamedTuple):
    """One place in a batch."""

    epoch: int
    sample: int
    is_padding: bool = False


MicroBatch = list[Slot]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Micro-batch k of this rank covers `batch_size` positions of a stream, from `start(k)` on."""

    batch_size: int
    rank: int
    world: int

    def start(self, k: int) -> int:
        return (k * self.world + self.rank) * self.batch_size


class TrainSampler(Sampler[MicroBatch]):
    """Endless micro-batches from `position` on, which counts samples over all ranks."""

    def __init__(self, *, order: Order, share: Share, position: int) -> None:
        self._order, self._share, self._position = order, share, position

    def __iter__(self) -> Iterator[MicroBatch]:
        k = 0
        while True:
            first = self._position + self._share.start(k)
            places = range(first, first + self._share.batch_size)
            yield [Slot(*self._order.locate(place)) for place in places]
            k += 1


class EvalSampler(Sampler[MicroBatch]):
    """Samples 0..num_samples-1 once over all ranks, in equally many full batches on each.

    What is left of the last batches is filled with samples marked as padding.
    """

    def __init__(self, *, num_samples: int, share: Share) -> None:
        self._num_samples, self._share = num_samples, share

    def __len__(self) -> int:
        return math.ceil(self._num_samples / (self._share.batch_size * self._share.world))

    def __iter__(self) -> Iterator[MicroBatch]:
        n = self._num_samples
        for k in range(len(self)):
            first = self._share.start(k)
            places = range(first, first + self._share.batch_size)
            yield [Slot(0, place % n, is_padding=place >= n) for place in places]
