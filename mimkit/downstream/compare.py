"""Two models on the same images: which is better, by how much, and could it be chance."""

import math
from statistics import NormalDist
from typing import NamedTuple

from mimkit.downstream.predictions import Predictions, paired


class Comparison(NamedTuple):
    """
    Attributes:
        images: that both were asked about.
        both, only_one, only_other, neither: how many of them which model got right.
        p: of McNemar's exact test, two-sided: how often two equally good models differ by as much.
        difference: accuracy of the one minus that of the other.
        low, high: its 95 % interval.
    """

    images: int
    both: int
    only_one: int
    only_other: int
    neither: int
    p: float
    difference: float
    low: float
    high: float


def compare(one: Predictions, other: Predictions, *, confidence: float = 0.95) -> Comparison:
    """About these two trained models and images like these; other seeds of training differ more.

    The test is the binomial one on images that exactly one model got right (McNemar 1947). The
    interval is Agresti and Min's (2005): Wald's of paired proportions after 1/2 was added to each
    of the four counts, which keeps its level for small counts too.

    Raises:
        UserError: the predictions are about other images, labels or classes.
    """
    pair = paired(one, other)
    images, both = len(pair.one_B), int((pair.one_B & pair.other_B).sum())
    first, second = (int(hits.sum()) - both for hits in pair)
    p = mcnemar_p(first, second)
    low, high = _interval(first, second, images, confidence)
    return Comparison(images, both, first, second, images - both - first - second, p,
                      (first - second) / images, low, high)  # fmt: skip


def mcnemar_p(only_one: int, only_other: int) -> float:
    """Exact two-sided p of McNemar's test, from how many images each model alone got right."""
    from scipy.stats import binomtest

    unlike = only_one + only_other
    return float(binomtest(only_one, unlike).pvalue) if unlike else 1.0


def _interval(first: int, second: int, images: int, confidence: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    total, only_one, only_other = images + 2, first + 0.5, second + 0.5
    centre = (only_one - only_other) / total
    half = z * math.sqrt(only_one + only_other - (only_one - only_other) ** 2 / total) / total
    return max(-1.0, centre - half), min(1.0, centre + half)
