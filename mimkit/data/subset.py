"""Some samples of a source, as a source of its own."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import Sample
from mimkit.data.order import WeightedSet
from mimkit.data.sources import Source
from mimkit.data.tars import Tar


class SubsetSource(Source):
    """The samples `numbers` of `parent`, in the parent's order, numbered anew from 0.

    Shards that no sample was chosen from are no groups any more; sets keep their weights.
    """

    def __init__(self, parent: Source, numbers: Iterable[int]) -> None:
        self._parent = parent
        self._numbers = np.unique(np.fromiter(numbers, np.int64))
        assert len(self._numbers), "somebody asks for no samples, and has not said so"
        assert self._numbers[0] >= 0 and self._numbers[-1] < len(parent)
        digest = hashlib.blake2b(parent.digest.encode(), digest_size=16)
        digest.update(self._numbers.astype("<i8").tobytes())
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return replace(self._parent[int(self._numbers[index])], index=index)

    def tar_of(self, index: int) -> Tar | None:
        return self._parent.tar_of(int(self._numbers[index]))

    @property
    def digest(self) -> str:
        """Of the parent's digest and the choice."""
        return self._digest

    @property
    def labels(self) -> NDArray[np.int64]:
        return self._parent.labels[self._numbers]

    @property
    def keys(self) -> list[str]:
        keys = self._parent.keys
        return [keys[number] for number in self._numbers.tolist()]

    @property
    def classes(self) -> list[str]:
        return self._parent.classes

    @property
    def groups(self) -> NDArray[np.int64]:
        return np.unique(np.searchsorted(self._numbers, self._parent.groups))

    @property
    def sets(self) -> list[WeightedSet]:
        bounds = [
            (*np.searchsorted(self._numbers, [part.first, part.last]).tolist(), part.weight)
            for part in self._parent.sets
        ]
        return [WeightedSet(*part) for part in bounds if part[0] < part[1]]
