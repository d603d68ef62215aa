"""Losses that jump: which updates, and which samples were in them."""

import statistics
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_WINDOW, _LEAST = 100, 20  # updates: looked back at, and seen before anything is called a jump
_DEVIATIONS = 8.0  # of the window's losses, by their median distance from the median
_SHARE = 0.02  # of the median: less is no jump, however steady the losses were


class Spike(NamedTuple):
    """The loss of all ranks at an update, and the median of those before it."""

    update: int
    loss: float
    median: float


@dataclass(frozen=True)
class _Micro:
    loss: Tensor  # of this rank, on its device
    index_B: Tensor


class SpikeWatch:
    """Keeps losses on the device until they are asked for, with the exchange that there is anyway.

    It judges by what it saw since the start of the process, so it changes no number of a run.
    """

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_WINDOW)
        self._micros: dict[int, list[_Micro]] = {}

    def note(self, update: int, loss: Tensor, index_B: Tensor) -> None:
        """A micro-batch of update number `update` (from 1)."""
        self._micros.setdefault(update, []).append(_Micro(loss.detach(), index_B))

    @property
    def news(self) -> bool:
        """Whether there was an update since it was last asked."""
        return bool(self._micros)

    def losses(self) -> Tensor:
        """This rank's mean loss of every update since it was last asked."""
        means = [torch.stack([m.loss.double() for m in ms]).mean() for ms in self._micros.values()]
        return torch.stack(means)

    def settle(self, losses: list[float]) -> list[Spike]:
        """The jumps among those updates, by the losses of all ranks: the same on every rank."""
        found = []
        for update, loss in zip(self._micros, losses, strict=True):
            if len(self._before) >= _LEAST and (median := self._is_jump(loss)) is not None:
                found.append(Spike(update, loss, median))
            self._before.append(loss)
        return found

    def _is_jump(self, loss: float) -> float | None:
        median = statistics.median(self._before)
        distance = statistics.median(abs(other - median) for other in self._before)
        far = max(_DEVIATIONS * 1.4826 * distance, _SHARE * abs(median))
        return median if not loss - median <= far else None

    def samples(self, update: int) -> list[int]:
        """Indices of this rank's samples of an update."""
        return [int(i) for micro in self._micros[update] for i in micro.index_B]

    def forget(self) -> None:
        """What was settled; the losses stay to compare with."""
        self._micros = {}
