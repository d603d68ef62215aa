"""Which samples make up the micro-batches of one rank: arithmetic on positions, no state."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from mimkit.data._shares import divide
from mimkit.data.order import Order, WeightedSet


class Slot(NamedTuple):
    """One place in a batch."""

    epoch: int
    sample: int
    copy: int = 0  # which time this epoch has the sample, see `Order`
    is_padding: bool = False

    def row(self, num_samples: int) -> int:
        """One number for sample and copy: what views and masks are keyed by, and token banks."""
        return self.sample + self.copy * num_samples


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
    """Each of `samples` once over all ranks, in equally many full batches on each.

    What is left of the last batches is filled with samples marked as padding.
    """

    def __init__(self, *, samples: NDArray[np.int64], share: Share) -> None:
        self._samples, self._share = samples, share

    def __len__(self) -> int:
        return math.ceil(len(self._samples) / (self._share.batch_size * self._share.world))

    def __iter__(self) -> Iterator[MicroBatch]:
        n = len(self._samples)
        for k in range(len(self)):
            first = self._share.start(k)
            places = range(first, first + self._share.batch_size)
            yield [Slot(0, int(self._samples[p % n]), is_padding=p >= n) for p in places]


def first_samples(sets: Sequence[WeightedSet], limit: int) -> NDArray[np.int64]:
    """The first `limit` samples, all if there are fewer; of several sets, each its share."""
    sizes = [part.last - part.first for part in sets]
    counts = divide(min(limit, sum(sizes)), sizes)
    spans = zip(sets, counts, strict=True)
    return np.concatenate([np.arange(part.first, part.first + count) for part, count in spans])
