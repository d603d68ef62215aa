"""Statistics of a stem's batch norms, measured on images instead of during training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mimkit.models.norms import BatchNorm2d
from mimkit.models.stems import Stem


def has_frozen_statistics(stem: Stem) -> bool:
    """Whether training leaves its batch statistics as they were measured before."""
    return any(norm.statistics == "frozen" for norm in batch_norms(stem))


@torch.no_grad()
def calibrate(stem: Stem, images: Iterable[Tensor]) -> None:
    """Sets running statistics to plain averages over batches of (normalised) image_BCHW.

    An untrained stem's are 0 and 1, and a trained one's those of augmented views; measured on the
    same images they compare on equal terms. Leaves the stem in eval mode.
    """
    norms = batch_norms(stem)
    with _averaging(norms):
        for norm in norms:
            norm.reset_running_stats()
        stem.train()
        for number, image_BCHW in enumerate(images if norms else (), start=1):
            for norm in norms:
                norm.momentum = 1 / number
            stem(image_BCHW)
        stem.eval()


@contextmanager
def _averaging(norms: list[BatchNorm2d]) -> Iterator[None]:
    """All places counted, frozen or not; settings restored afterwards."""
    before = [(norm.momentum, norm.statistics) for norm in norms]
    try:
        for norm in norms:
            norm.statistics = "all"
        yield
    finally:
        for norm, (momentum, statistics) in zip(norms, before, strict=True):
            norm.momentum, norm.statistics = momentum, statistics


def batch_norms(stem: Stem) -> list[BatchNorm2d]:
    """Every batch norm of the stem."""
    return [module for module in stem.modules() if isinstance(module, BatchNorm2d)]
