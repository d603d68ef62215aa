"""Which share of a training step goes into the tokenizer: measured while it trains, waiting for
nothing."""

import statistics
import time

import torch
from torch import Tensor

from mimkit.tokenizers import VisualTokenizer

_MOST = 64  # calls that are timed: the first ones, then every tenth
_ALL_UP_TO = 12


class WatchedTokenizer(VisualTokenizer):
    """A tokenizer as it is, with a clock around some calls of `encode`.

    On a GPU the clock is two events in the stream, which are read when the training is over.
    """

    def __init__(self, tokenizer: VisualTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.patch, self.prediction_dim = tokenizer.patch, tokenizer.prediction_dim
        self.vocabulary, self.fingerprint = tokenizer.vocabulary, tokenizer.fingerprint
        self._calls = 0
        self._seconds_an_image: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []

    def encode(self, view_BChw: Tensor) -> Tensor:
        self._calls += 1
        timed = self._calls <= _ALL_UP_TO or not self._calls % 10
        if self._calls == 1 or not timed or self._timed() == _MOST:  # the first one also warms up
            return self._tokenizer.encode(view_BChw)
        if view_BChw.is_cuda:
            return self._between_events(view_BChw)
        started = time.perf_counter()
        target = self._tokenizer.encode(view_BChw)
        self._seconds_an_image.append((time.perf_counter() - started) / len(view_BChw))
        return target

    def _timed(self) -> int:
        return len(self._seconds_an_image) + len(self._events)

    def _between_events(self, view_BChw: Tensor) -> Tensor:
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        target = self._tokenizer.encode(view_BChw)
        end.record()
        self._events.append((start, end, len(view_BChw)))
        return target

    def loss(self, predicted_MV: Tensor, target_M: Tensor) -> Tensor:
        return self._tokenizer.loss(predicted_MV, target_M)

    def seconds_an_image(self) -> float | None:
        """The median of this rank; None where fewer than two calls were made. Waits for the GPU."""
        for start, end, images in self._events:
            end.synchronize()
            self._seconds_an_image.append(start.elapsed_time(end) / 1e3 / images)
        self._events.clear()
        return statistics.median(self._seconds_an_image) if self._seconds_an_image else None

    def share(self, *, images_per_second: float | None, world: int) -> float | None:
        """Of the time of a step: 0 to 1; None where there was too little to measure.

        Args:
            images_per_second: of all ranks, in training, without evaluations.
            world: ranks that encode at the same time.
        """
        seconds = self.seconds_an_image()
        if seconds is None or not images_per_second:
            return None
        return min(1.0, seconds * images_per_second / world)
