"""Batch statistics measured on images."""

import pytest
import torch

from mimkit.models.calibration import calibrate, has_frozen_statistics
from mimkit.models.norms import BatchNorm2d
from mimkit.models.stems import STEMS


@pytest.mark.parametrize("statistics", ["all", "visible", "frozen"])
def test_statistics_become_those_of_the_images(statistics: str) -> None:
    stem = STEMS["hmlp"](width=32, patch_size=8, statistics=statistics)
    first, second = torch.rand(2, 3, 3, 32, 32)
    calibrate(stem, [first, second])
    convolution, norm = stem.layers[0], stem.layers[1]
    with torch.no_grad():
        features = torch.stack([convolution(first), convolution(second)])
    assert torch.allclose(norm.running_mean, features.mean((0, 1, 3, 4)), atol=1e-6)
    variances = [batch.var((0, 2, 3)) for batch in features]
    assert torch.allclose(norm.running_var, sum(variances) / 2, rtol=1e-5)
    assert (norm.momentum, norm.statistics, norm.training) == (0.1, statistics, False)
    assert has_frozen_statistics(stem) == (statistics == "frozen")


def test_a_stem_without_batch_norm_reads_no_image() -> None:
    stem = STEMS["hmlp"](width=32, norm="ln").train()
    calibrate(stem, (1 / 0 for _ in range(3)))
    assert not any(isinstance(module, BatchNorm2d) for module in stem.modules())
    assert not has_frozen_statistics(stem)
