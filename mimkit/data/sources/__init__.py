"""A source gives encoded samples by number. Contract, and the registry over this folder."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import Sample
from mimkit.data.order import WeightedSet
from mimkit.data.tars import Tar
from mimkit.registry import Registry


class Source(ABC):
    """Samples by number 0..len-1. Safe to send to spawned and forked workers."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @property
    @abstractmethod
    def digest(self) -> str:
        """Hash of what the samples are and in which order they are numbered."""

    @property
    @abstractmethod
    def labels(self) -> NDArray[np.int64]:
        """One label a sample, NO_LABEL where there is none."""

    @property
    @abstractmethod
    def keys(self) -> Sequence[str]:
        """One a sample, unique in a set."""

    @property
    def classes(self) -> list[str]:
        """Names of the labels 0, 1, ...; empty where nobody wrote them down."""
        return []

    @property
    def groups(self) -> NDArray[np.int64]:
        """Bounds of the runs of samples that lie together on disk (shards): 0, ..., len."""
        return np.array([0, len(self)], np.int64)

    def tar_of(self, index: int) -> Tar | None:
        """The shard that sample `index` lies in; None where it lies in none."""
        return None

    @property
    def sets(self) -> list[WeightedSet]:
        """How often an epoch of training has which samples; each once, unless sets are mixed."""
        return [WeightedSet(0, len(self))]

    @property
    def epoch_length(self) -> int:
        """Samples in an epoch of training."""
        return sum(part.num_drawn for part in self.sets)


SOURCES: Registry[Callable[..., Source]] = Registry("source", __name__)
