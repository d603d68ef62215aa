"""The order of samples: a pure function of (seed, epoch), and an endless stream of positions."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimkit.errors import UserError
from mimkit.random import Purpose, generator


class WeightedSet(NamedTuple):
    """Samples `first` to `last` - 1 of a source; an epoch has each of them `weight` times.

    That is floor(weight) times each, and `num_extra` of them once more, others in every epoch.
    """

    first: int
    last: int
    weight: float = 1.0

    @property
    def copies(self) -> int:
        return math.floor(self.weight)

    @property
    def num_extra(self) -> int:
        return round((self.weight - self.copies) * (self.last - self.first))

    @property
    def num_drawn(self) -> int:
        """In an epoch; the same in all of them."""
        return self.copies * (self.last - self.first) + self.num_extra


class Place(NamedTuple):
    """What stands at one position of the stream."""

    epoch: int
    sample: int
    copy: int  # 0, 1, ...: which time this epoch has the sample


class Order:
    """Position p of the stream is place p % N of epoch p // N; every epoch has each sample once.

    The shards of an epoch are permuted and taken `window` at a time; the samples of a window are
    permuted. A window that holds all shards is a full shuffle; a small one reads only a few files
    at a time, which matters on spinning disks and network file systems.

    Args:
        groups: bounds of the shards, 0, ..., number of samples (see `Source.groups`).
        seed: with the epoch, the key of the permutation.
        window: shards that are mixed with each other.
        sets: how often an epoch has which samples, where that is not once; bounds of sets are
            bounds of shards.
        repeats: R > 1: repeated augmentation as in DeiT's RASampler. Each sample stands R times in
            a row, as R copies, and an epoch, which is no longer, ends after N / R of them.
    """

    def __init__(
        self,
        *,
        groups: NDArray[np.int64],
        seed: int,
        window: int,
        sets: Sequence[WeightedSet] | None = None,
        repeats: int = 1,
    ) -> None:
        if window < 1:
            raise UserError(f"data.window is {window}; expected the number of shards to mix, >= 1.")
        self._groups, self._seed, self._window, self._repeats = groups, seed, window, repeats
        self._num_samples = int(groups[-1])
        self._sets = [WeightedSet(0, self._num_samples)] if sets is None else list(sets)
        self._length = sum(part.num_drawn for part in self._sets)
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Places in an epoch."""
        return self._length

    def locate(self, position: int) -> Place:
        """What stands at `position` >= 0 of the endless stream."""
        epoch, place = divmod(position, len(self))
        copy, sample = divmod(int(self.epoch_order(epoch)[place]), self._num_samples)
        return Place(epoch, sample, copy)

    def epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """For each place `sample + copy * number of samples`; the last two epochs are kept."""
        if epoch not in self._epochs:
            kept = {e: order for e, order in self._epochs.items() if e == epoch - 1}
            self._epochs = {**kept, epoch: self._permute(epoch)}
        return self._epochs[epoch]

    def every_row(self) -> NDArray[np.int64]:
        """All entries that `epoch_order` has for some seed or epoch, ascending (one view each)."""
        n, sets = self._num_samples, self._sets
        return np.sort(np.concatenate([
            np.arange(part.first, part.last) + copy * n
            for part in sets for copy in range(part.copies + (part.num_extra > 0))
        ]))  # fmt: skip

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        rng = generator(Purpose.ORDER, seed=self._seed, epoch=epoch)
        shards = self._shards(epoch)
        turns = rng.permutation(len(shards))
        windows = []
        for first in range(0, len(turns), self._window):
            samples = np.concatenate([shards[s] for s in turns[first : first + self._window]])
            rng.shuffle(samples)
            windows.append(samples)
        return self._repeated(np.concatenate(windows))

    def _repeated(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Copy c of a sample becomes its copies c R to c R + R - 1."""
        if self._repeats == 1:
            return places
        copies, samples = np.divmod(places[: math.ceil(len(places) / self._repeats)],
                                    self._num_samples)  # fmt: skip
        each = copies[:, None] * self._repeats + np.arange(self._repeats)
        return (samples[:, None] + each * self._num_samples).ravel()[: len(places)]

    def _shards(self, epoch: int) -> list[NDArray[np.int64]]:
        """The entries of `epoch_order` that come from each shard."""
        shards, n = [], self._num_samples
        for number, part in enumerate(self._sets):
            bounds = self._groups[(part.first <= self._groups) & (self._groups <= part.last)]
            extra = self._extra(epoch, number)
            extras = np.split(extra, np.searchsorted(extra, bounds[1:-1]))
            for (first, last), once_more in zip(pairwise(bounds), extras, strict=True):
                copies = [np.arange(first, last) + copy * n for copy in range(part.copies)]
                shards.append(np.concatenate([*copies, once_more + part.copies * n]))
        return shards

    def _extra(self, epoch: int, number: int) -> NDArray[np.int64]:
        """The samples of a set that this epoch has once more, sorted."""
        part = self._sets[number]
        # sample 0 of this purpose is the order itself
        rng = generator(Purpose.ORDER, seed=self._seed, epoch=epoch, sample=1 + number)
        chosen = rng.choice(part.last - part.first, part.num_extra, replace=False)
        return part.first + np.sort(chosen)
