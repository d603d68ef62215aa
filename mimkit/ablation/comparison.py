"""One measure of a study: every arm against one other arm, corrected for their number."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mimkit.ablation.intervals import (
    Difference,
    Floats,
    Hits,
    Interval,
    bootstrap_difference,
    paired_difference,
)
from mimkit.ablation.significance import (
    PAPER_GAIN,
    McNemar,
    holm,
    mcnemar,
    seeds_to_show,
    smallest_detectable,
)

MARGIN = 1e-12  # of a p-value against alpha, for rounding


@dataclass(frozen=True)
class Scores:
    """Accuracies of an arm by seed, and, where they are kept, its hits on each image by seed."""

    accuracy: Mapping[int, float]
    hits: Mapping[int, Hits]


@dataclass(frozen=True)
class Comparison:
    """One arm minus another one, on the seeds that both have.

    Attributes:
        corrected: the interval at the level of Holm's step; excludes zero exactly where this step
            would reject. None for one seed.
        adjusted_p: Holm's.
        shown: whether there is a difference, corrected.
        images: bootstrap interval over seeds and images; None without hits.
        pairs: McNemar's test of each pair of runs.
        smallest: true difference that would be shown with a chance of 80 %; None for one seed.
        seeds_for_paper: pairs that would show the paper's +0.38 points; None for one seed.
    """

    arm: str
    against: str
    difference: Difference
    corrected: Interval | None
    adjusted_p: float | None
    shown: bool
    images: Interval | None
    pairs: list[McNemar]
    smallest: float | None
    seeds_for_paper: int | None


@dataclass(frozen=True)
class Decision:
    """What the verdict stands on: a paired difference, and whether it is shown after correction.

    Attributes:
        share: the level of Holm's step; None for one seed.
    """

    seeds: list[int]
    difference: Difference
    corrected: Interval | None
    adjusted_p: float | None
    share: float | None
    shown: bool


def decide(scores: Mapping[str, Scores], *, against: str, confidence: float) -> dict[str, Decision]:
    """Every other arm against one, in their order; arms without a common seed are left out."""
    other, alpha = scores[against], 1 - confidence
    common = {
        arm: [seed for seed in found.accuracy if seed in other.accuracy]
        for arm, found in scores.items()
        if arm != against
    }
    pairs = {arm: (_accuracies(scores[arm], seeds), _accuracies(other, seeds))
             for arm, seeds in common.items() if seeds}  # fmt: skip
    found = {arm: paired_difference(*pair, confidence=confidence) for arm, pair in pairs.items()}
    tested = {arm: one.p for arm, one in found.items() if one.p is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    steps = {arm: step for step, arm in enumerate(sorted(tested, key=lambda a: tested[a]))}
    shares = {arm: alpha / (len(tested) - step) for arm, step in steps.items()}
    return {
        arm: Decision(
            common[arm], one,
            corrected=paired_difference(*pairs[arm], confidence=1 - shares[arm]).interval
            if arm in shares else None,
            adjusted_p=adjusted.get(arm), share=shares.get(arm),
            shown=arm in adjusted and adjusted[arm] < alpha - MARGIN,
        )
        for arm, one in found.items()
    }  # fmt: skip


def compare(scores: Mapping[str, Scores], *, against: str, confidence: float) -> list[Comparison]:
    """`decide`, with what else is worth knowing."""
    return [
        _comparison(arm, against, scores[arm], scores[against], one, confidence)
        for arm, one in decide(scores, against=against, confidence=confidence).items()
    ]


def _comparison(
    arm: str, against: str, scores: Scores, other: Scores, one: Decision, confidence: float
) -> Comparison:
    smallest = needed = None
    if one.share is not None and one.difference.std:
        spread = {"std": one.difference.std, "alpha": one.share}
        smallest = smallest_detectable(seeds=one.difference.seeds, **spread)
        needed = seeds_to_show(PAPER_GAIN, **spread)
    kept = [seed for seed in one.seeds if seed in scores.hits and seed in other.hits]
    return Comparison(
        arm, against, one.difference, one.corrected, one.adjusted_p, one.shown,
        images=_over_images(scores, other, kept, confidence),
        pairs=[mcnemar(scores.hits[seed], other.hits[seed]) for seed in kept],
        smallest=smallest, seeds_for_paper=needed,
    )  # fmt: skip


def _accuracies(scores: Scores, seeds: list[int]) -> Floats:
    return np.array([scores.accuracy[seed] for seed in seeds])


def _over_images(
    scores: Scores, other: Scores, seeds: list[int], confidence: float
) -> Interval | None:
    if not seeds:
        return None
    arm_SB, other_SB = (np.stack([one.hits[seed] for seed in seeds]) for one in (scores, other))
    return bootstrap_difference(arm_SB, other_SB, confidence=confidence)
