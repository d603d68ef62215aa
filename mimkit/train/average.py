"""A running average of the weights, kept where the weights live."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mimkit.train.runtimes import Runtime


def decay_at(updates: int, *, decay: float) -> float:
    """The decay after `updates` updates: min(decay, (1 + updates) / (10 + updates)).

    The ramp (TensorFlow's rule for ExponentialMovingAverage with num_updates) forgets the initial
    weights in a short run: 0.9999 alone would remember 90 % of them after 1,000 updates.
    """
    return min(decay, (1 + updates) / (10 + updates))


class WeightAverage:
    """average <- d * average + (1 - d) * weights after every update, d of `decay_at`.

    Of every trained parameter this rank's part: whole at ZeRO stages 0-2, where ranks hold equal
    weights and so equal averages; its shard at stage 3, so that nothing is gathered. What is not
    trained and the buffers (running statistics of batch norms) are the model's own, not averaged.

    Args:
        runtime: prepared.
        start: whole tensors of a checkpoint to go on from; without it the present weights.
    """

    def __init__(
        self, runtime: Runtime, *, decay: float, start: Mapping[str, Tensor] | None = None
    ) -> None:
        self._runtime, self._decay = runtime, decay
        parts = runtime.parts()
        self._weights = list(parts.values())
        self._averages = [weight.clone() for weight in self._weights]
        if start is not None:
            self.set(start)

    def set(self, whole: Mapping[str, Tensor]) -> None:
        """To the average that a checkpoint holds."""
        for name, average in zip(self._runtime.parts(), self._averages, strict=True):
            average.copy_(self._runtime.part_of(name, whole[name]))

    @torch.no_grad()
    def advance(self, updates: int) -> None:
        """Takes the weights in; `updates` were done before the one that made them."""
        weight = 1 - decay_at(updates, decay=self._decay)
        torch._foreach_lerp_(self._averages, self._weights, weight)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the averages meanwhile. All ranks must enter it.

        The weights come back bit for bit: both are copied, not computed. Do not train inside.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        with self._runtime.writing_parts():
            for weight, average in zip(self._weights, self._averages, strict=True):
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)

    def whole(self) -> dict[str, Tensor]:
        """As `Runtime.weights` gives them, with the averages in place. All ranks must call it."""
        with self.in_place():
            return self._runtime.weights()
