"""One measure of a study: every arm against one other arm, corrected for their number."""

from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True)
class Scores:
    """Accuracies of an arm by seed, and, where they are kept, its hits on each image by seed."""

    accuracy: Mapping[int, float]
    hits: Mapping[int, Hits]


@dataclass(frozen=True)
class Comparison:
    """One arm minus another one, on the seeds that both have.

    Attributes:
        corrected: the interval at the level of Holm's step; None for one seed.
        adjusted_p: Holm's; None for one seed, or where all pairs differ by the same.
        shown: whether there is a difference, corrected: exactly where `corrected` excludes zero.
        images: bootstrap interval over seeds and images; None without hits.
        pairs: McNemar's test of each pair of runs.
        smallest: true difference that would be shown with a chance of 80 %.
        seeds_for_paper: pairs that would show the paper's +0.38 points. Both are None where
            `adjusted_p` is.
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
        share: the level of Holm's step, or of the step that stopped before; None for one seed.
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
    tested = {arm: 1.0 if one.p is None else one.p for arm, one in found.items() if one.seeds > 1}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    steps = dict(
        _steps({arm: pairs[arm] for arm in sorted(tested, key=lambda a: tested[a])}, alpha)
    )
    return {arm: _decision(common[arm], one, adjusted.get(arm), steps.get(arm))
            for arm, one in found.items()}  # fmt: skip


_Pair = tuple[Floats, Floats]  # accuracies of an arm, and of the other, by seed


def _steps(
    pairs: Mapping[str, _Pair], alpha: float
) -> Iterator[tuple[str, tuple[float, Interval]]]:
    """Holm's step-down by intervals: each arm with the level that it is judged at.

    Step k of m is at alpha / (m - k). The first that does not reject is the last one: the arms that
    come after it keep its level, so that their intervals, with their larger p, hold zero too.

    Args:
        pairs: the smallest p first.
    """
    level, goes_on = alpha, True
    for step, (arm, pair) in enumerate(pairs.items()):
        level = alpha / (len(pairs) - step) if goes_on else level
        interval = paired_difference(*pair, confidence=1 - level).interval
        goes_on = goes_on and interval.excludes_zero
        yield arm, (level, interval)


def _decision(
    seeds: list[int], one: Difference, adjusted: float | None, step: tuple[float, Interval] | None
) -> Decision:
    share, corrected = step or (None, None)
    return Decision(
        seeds, one, corrected, adjusted_p=None if one.p is None else adjusted, share=share,
        shown=corrected is not None and corrected.excludes_zero,
    )  # fmt: skip


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
