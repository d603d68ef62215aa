"""Arithmetic of a whole pretraining on many GPUs: hours, data, storage, exchange of gradients.

Every figure says where it comes from: counted (FLOPs, parameters, bytes), measured (by the other
benches, on whatever machine) or assumed (what a GPU reaches, how fast a network is).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mimkit.bench.our_step import count_flops
from mimkit.bench.workload import GRID, make_model

IMAGES = 1_281_167  # ImageNet-1k, one epoch
TOKENIZER_GFLOP = 52.12  # counted: DALL-E's encoder on 112 pixels, forward only
_TOKEN_BYTES = 2  # uint16


@dataclass(frozen=True)
class Figures:
    """What the arithmetic starts from.

    Attributes:
        teraflops: that a GPU reaches in this step, not its peak.
        network: bytes a second of one GPU to another machine; `link`: within one.
        data_seconds: CPU seconds an image of the input pipeline, without the tokenizer's view.
        jpeg_bytes: of a stored image.
    """

    teraflops: float = 346.0  # assumed: 35 % of an H100's 989 in bf16
    network: float = 25e9  # assumed
    link: float = 300e9  # assumed
    data_seconds: float = 1 / 274  # measured: BEiT's order of operations, no token view
    jpeg_bytes: float = 108e3  # measured: 300 images of ImageNet
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Run:
    """One size on one number of GPUs; `hours` by epochs, with a token bank and without."""

    size: str
    gpus: int
    batch: int  # global
    images_per_second: float  # of a GPU, tokens given
    with_tokenizer: float  # of a GPU, tokenizer in every step
    hours: dict[int, float]
    hours_with_tokenizer: dict[int, float]
    compute_ms: float  # of an update
    exchange_ms: float  # all-reduce of float32 gradients, ring
    jpeg_gigabytes: float  # a second a node
    cores: float  # a node, for loading

    @property
    def exchange_hides(self) -> bool:
        """Whether the exchange fits into backward, two thirds of the computing."""
        return self.exchange_ms < 2 / 3 * self.compute_ms


def scale(
    size: str, gpus: int, *, figures: Figures, epochs: Sequence[int] = (300, 800), batch: int = 2048
) -> Run:
    """Ideal compute scaling, and beside it what stands in its way."""
    step, parameters = _counted(size)
    rate, slow = (1e3 * figures.teraflops / work for work in (step, step + TOKENIZER_GFLOP))
    node = min(gpus, figures.gpus_per_node)
    return Run(
        size=size,
        gpus=gpus,
        batch=batch,
        images_per_second=rate,
        with_tokenizer=slow,
        hours={number: number * IMAGES / (rate * gpus) / 3600 for number in epochs},
        hours_with_tokenizer={number: number * IMAGES / (slow * gpus) / 3600 for number in epochs},
        compute_ms=1e3 * batch / gpus / rate,
        exchange_ms=1e3 * exchange_seconds(parameters, gpus, figures),
        jpeg_gigabytes=node * rate * figures.jpeg_bytes / 1e9,
        cores=node * rate * figures.data_seconds,
    )


@functools.cache
def _counted(size: str) -> tuple[float, int]:
    """GFLOP of an image's step, and parameters."""
    model = make_model(size, device="meta")
    return count_flops(model)[1], sum(p.numel() for p in model.parameters())


def exchange_seconds(parameters: int, gpus: int, figures: Figures) -> float:
    """Of a ring: every GPU sends and receives 2 (n - 1) / n of the gradients, 4 bytes each."""
    speed = figures.link if gpus <= figures.gpus_per_node else figures.network
    return 2 * (gpus - 1) / gpus * 4 * parameters / speed


def bank_gigabytes(epochs: int) -> float:
    """Tokens of every view of so many epochs, 2 bytes each."""
    return epochs * IMAGES * GRID[0] * GRID[1] * _TOKEN_BYTES / 1e9


def ablation_hours(run_alone: Run, run_wide: Run, *, jobs: int, epochs: int) -> tuple[float, float]:
    """Hours of so many runs: side by side with a node each, and one after the other on all GPUs.

    The second waits in every update for what of the exchange does not hide in backward.
    """
    return run_alone.hours[epochs], jobs * run_wide.hours[epochs] * slowdown(run_wide)


def slowdown(run: Run) -> float:
    """Time of an update over its computing, if two thirds of that hide the exchange."""
    rest = max(0.0, run.exchange_ms - 2 / 3 * run.compute_ms)
    return 1 + rest / run.compute_ms
