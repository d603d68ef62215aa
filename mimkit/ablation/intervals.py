"""Means and paired differences over seeds, and over images, with intervals. Pure functions.

What is paired: run s of one arm and run s of another share their samples, crops, masks, tokens and
initial weights, so what a seed does to both cancels in the difference. A seed is the unit: images
within a run are not independent evidence about a stem.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimkit.random import Purpose, generator

Floats = NDArray[np.float64]
Hits = NDArray[np.bool_]  # (seeds, images): whether the run with this seed is right on the image
_ROUNDING = 1e-12  # a standard deviation below it is that of equal numbers


class Interval(NamedTuple):
    """An estimate; low and high are None where there is no spread to judge by.

    That is one seed; or equal numbers, which say of the next one no more than one of them does.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Difference:
    """One arm minus another, paired by seed.

    Attributes:
        interval: of the mean over seeds by Student's t.
        std: of the differences, over seeds; None for one seed.
        p: two-sided, of the paired t-test; None for one seed, and where all pairs differ by the
            same: t would be infinite or 0/0. With few images that happens to equal stems too.
        seeds: how many pairs.
    """

    interval: Interval
    std: float | None
    p: float | None
    seeds: int


def mean_interval(values: Floats, *, confidence: float) -> Interval:
    """Mean over seeds and its t-interval."""
    from scipy import stats

    values = np.asarray(values, float)
    mean, count, std = float(values.mean()), len(values), _std(values)
    if not std:
        return Interval(mean, None, None)
    half = float(stats.t.ppf((1 + confidence) / 2, count - 1) * std / count**0.5)
    return Interval(mean, mean - half, mean + half)


def _std(values: Floats) -> float | None:
    """Over seeds; 0 where they are equal but for rounding, None for one seed."""
    if len(values) < 2:
        return None
    std = float(values.std(ddof=1))
    return std if std > _ROUNDING else 0.0


def paired_difference(arm: Floats, other: Floats, *, confidence: float) -> Difference:
    """`arm` minus `other`, seed by seed.

    Raises:
        ValueError: not as many of one as of the other.
    """
    from scipy import stats

    if len(arm) != len(other):
        raise ValueError(f"{len(arm)} and {len(other)} seeds cannot be paired")
    differences = np.asarray(arm, float) - np.asarray(other, float)
    interval, count = mean_interval(differences, confidence=confidence), len(differences)
    std = _std(differences)
    if not std:
        return Difference(interval, std, None, count)
    t = interval.value / (std / count**0.5)
    return Difference(interval, std, float(2 * stats.t.sf(abs(t), count - 1)), count)


def bootstrap_difference(
    arm_SB: Hits, other_SB: Hits, *, confidence: float, repeats: int = 2000, seed: int = 0
) -> Interval:
    """Mean difference with a percentile interval over seeds and images, both drawn with return.

    Pairs of runs and images are drawn anew in each repeat, images for all pairs at once, since the
    runs were judged on the same ones: the pigeonhole bootstrap (Owen 2007), which counts three
    times what belongs neither to a seed nor to an image, and so is a little too wide with many of
    both. With few seeds it is far too narrow: three draws of three show less spread than there is.
    It stands beside the t-interval and does not replace it; with one seed it is about images alone.
    """
    gain_SB = arm_SB.astype(np.float64) - other_SB
    seeds, images = gain_SB.shape
    rng = generator(Purpose.RESAMPLING, seed=seed)
    weight_RS = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=repeats) / seeds
    means = np.empty(repeats)
    for first in range(0, repeats, 200):
        weight_rS = weight_RS[first : first + 200]
        count_rB = rng.multinomial(images, np.full(images, 1 / images), size=len(weight_rS))
        means[first : first + 200] = np.einsum("rs,sb,rb->r", weight_rS, gain_SB, count_rB / images,
                                               optimize=True)  # fmt: skip
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(gain_SB.mean()), float(low), float(high))
