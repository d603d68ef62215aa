"""Tests, corrections and power; the tests compare them with statsmodels."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimkit.downstream.compare import mcnemar_p

PAPER_GAIN = 0.0038  # hMLP with BN over linear under BEiT: 83.43 - 83.05 % (paper, Table 7)
MOST_SEEDS = 10_000  # more are not counted


class McNemar(NamedTuple):
    """Two runs on the same images: who alone is right how often, and the exact two-sided p.

    It asks whether these two trained models differ. Two runs of one stem with two seeds do, more
    often than its level says, so it decides nothing about stems.
    """

    only_arm: int
    only_other: int
    p: float


def mcnemar(arm_B: NDArray[np.bool_], other_B: NDArray[np.bool_]) -> McNemar:
    """Exact (binomial) McNemar test of one pair of runs."""
    only_arm, only_other = int((arm_B & ~other_B).sum()), int((other_B & ~arm_B).sum())
    return McNemar(only_arm, only_other, mcnemar_p(only_arm, only_other))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family of comparisons (Holm 1979), in the given order.

    Rejecting those below alpha keeps the chance of any false alarm in the family below alpha,
    however the comparisons depend on each other. statsmodels has the same, with a garbage
    collection at every call: 0.18 s, and false alarms are counted over thousands of them.
    """
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.minimum(1, np.maximum.accumulate(factors * np.asarray(p_values, float)[order]))
    found = np.empty(len(p_values))
    found[order] = adjusted
    return [float(p) for p in found]


def power(difference: float, *, std: float, seeds: int, alpha: float) -> float:
    """Chance that a two-sided paired t-test at `alpha` sees a true mean difference.

    Args:
        std: of the differences between paired runs, above 0.
    """
    from scipy import stats

    if seeds < 2:
        return 0.0
    shift, freedom = abs(difference) / std * seeds**0.5, seeds - 1
    limit = stats.t.ppf(1 - alpha / 2, freedom)
    wrong_side = stats.nct.cdf(-limit, freedom, shift)  # scipy gives nan where it vanishes
    return float(stats.nct.sf(limit, freedom, shift) + np.nan_to_num(wrong_side))


def smallest_detectable(*, std: float, seeds: int, alpha: float, wanted: float = 0.8) -> float:
    """The true difference that this many pairs show with the chance `wanted`.

    Raises:
        ValueError: fewer than two seeds show nothing.
    """
    from scipy import optimize

    if seeds < 2:
        raise ValueError(f"{seeds} seed shows no difference of any size; at least 2 are needed")
    high = 1.0

    def lack(ratio: float) -> float:
        return power(ratio, std=1.0, seeds=seeds, alpha=alpha) - wanted

    while lack(high) < 0:
        high *= 2
    return std * float(optimize.brentq(lack, 0.0, high, xtol=1e-6))


def seeds_to_show(difference: float, *, std: float, alpha: float, wanted: float = 0.8) -> int:
    """The fewest pairs that show a true difference with the chance `wanted`; MOST_SEEDS at most."""
    low, high = 1, 2
    while high < MOST_SEEDS and power(difference, std=std, seeds=high, alpha=alpha) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if power(difference, std=std, seeds=middle, alpha=alpha) < wanted:
            low = middle
        else:
            high = middle
    return min(high, MOST_SEEDS)
