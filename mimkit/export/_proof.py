"""What a proof consists of: differences on the same images, and how long both take."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_TIMES = 3
_LOGITS = 2  # dimensions, of a batch; tokens have three


@dataclass(frozen=True)
class Comparison:
    """Outputs of the source and of the loaded model on images of one size.

    Differences are absolute, but of logits beyond one in units of the largest: they may be of any
    size, and float32 has seven digits.
    """

    height: int
    width: int
    images: int
    max_difference: float
    mean_difference: float
    shapes_differ: str | None = None  # says which, and then there are no differences


class Latency(NamedTuple):
    """Milliseconds for one image on the CPU with torch's number of threads, medians of 3."""

    source: float
    loaded: float
    threads: int


@dataclass(frozen=True)
class Proof:
    """How what was loaded back compares with the source."""

    comparisons: Sequence[Comparison]  # the encoder's own size first
    tolerance: float
    latency: Latency
    bf16_difference: float | None  # of the loaded model in bfloat16; None where it cannot be cast

    @property
    def images(self) -> int:
        return self.comparisons[0].images

    @property
    def max_difference(self) -> float:
        return max(comparison.max_difference for comparison in self.comparisons)


def compared(expected: Tensor, got: Tensor, image_BCHW: Tensor) -> Comparison:
    batch, _, height, width = image_BCHW.shape
    if got.shape != expected.shape:
        words = (
            f"the exported model gives outputs of shape {tuple(got.shape)}, the encoder "
            f"{tuple(expected.shape)}"
        )
        return Comparison(height, width, batch, float("nan"), float("nan"), words)
    unit = expected.abs().max().clamp(min=1) if expected.ndim == _LOGITS else 1
    difference = (got - expected).abs() / unit
    return Comparison(height, width, batch, float(difference.max()), float(difference.mean()))


def latency(
    source: Callable[[Tensor], Tensor], loaded: Callable[[Tensor], Tensor], image_1CHW: Tensor
) -> Latency:
    return Latency(
        _milliseconds(source, image_1CHW),
        _milliseconds(loaded, image_1CHW),
        torch.get_num_threads(),
    )


@torch.no_grad()
def _milliseconds(call: Callable[[Tensor], Tensor], image_1CHW: Tensor) -> float:
    seconds = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        call(image_1CHW)
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)
