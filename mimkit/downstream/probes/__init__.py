"""A probe asks frozen features one question. Contract, and the registry over this folder.

Which layer, pooling and setting win is decided on images held out of the training split; the test
split is then judged once (`select`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mimkit.downstream.features import Features
from mimkit.registry import Registry

Progress = Callable[[int, int], object]  # done, total


class Candidate(NamedTuple):
    """One way to put the question. `setting`: kNN's neighbours, the learning rate of others."""

    layer: int
    pooling: str
    setting: float


class Candidates(NamedTuple):
    """All that are tried."""

    layers: tuple[int, ...]
    poolings: tuple[str, ...]
    settings: tuple[float, ...]

    @classmethod
    def only(cls, one: Candidate) -> "Candidates":
        """That one."""
        return cls((one.layer,), (one.pooling,), (one.setting,))


class Probe(ABC):
    """Attributes:
    setting: what `Candidate.setting` is, in a word.
    needs_tokens: whether it looks at tokens instead of pooled features.
    """

    setting: str
    needs_tokens = False

    @abstractmethod
    def candidates(self, features: Features) -> Candidates:
        """What is worth trying on such features."""

    @abstractmethod
    def logits(
        self,
        candidates: Candidates,
        train: Features,
        fit: Tensor,
        judged: Features,
        rows: Tensor,
        *,
        num_classes: int,
        progress: Progress,
    ) -> dict[Candidate, Tensor]:
        """logit_BV of the `rows` of `judged`, learnt from the rows `fit` of `train`, for every one
        of the candidates, all in one pass."""


PROBES: Registry[Callable[..., Probe]] = Registry("probe", __name__)


def all_rows(features: Features) -> Tensor:
    """Numbers of all its images."""
    return torch.arange(len(features))
