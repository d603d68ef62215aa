"""How often the whole procedure claims a difference where there is none: A/A studies, resampled."""

from dataclasses import dataclass

import numpy as np

from mimkit.ablation.comparison import Scores, decide
from mimkit.ablation.intervals import Hits
from mimkit.ablation.significance import mcnemar
from mimkit.random import Purpose, Rng, generator


@dataclass(frozen=True)
class FalseAlarms:
    """Of `repeats` studies whose arms are one stem under several names.

    Attributes:
        claims: studies in which any arm was called better or worse.
        low, high: between which as many claims fall, 99 times in a hundred, if the rate is the
            nominal one.
        mcnemar: share of single pairs of runs that McNemar's test calls different at that level.
    """

    repeats: int
    claims: int
    nominal: float
    low: int
    high: int
    mcnemar: float

    @property
    def rate(self) -> float:
        return self.claims / self.repeats


def false_alarms(
    hits_SB: Hits, *, arms: int, seeds: int, confidence: float, repeats: int, seed: int = 0
) -> FalseAlarms:
    """Studies of `arms` names, one of them the reference, drawn from stored runs of one stem.

    A drawn run takes a random half of the images from one stored run, and each other image from any
    of them: so it has both kinds of spread that real runs have, from run to run and from image to
    image, and no two are equal. All are drawn alike, so that a claim is a false alarm.

    Raises:
        ValueError: fewer than two stored runs.
    """
    from scipy import stats

    if len(hits_SB) < 2:
        raise ValueError(f"{len(hits_SB)} stored run has no spread; at least 2 are needed")
    rng, alpha = generator(Purpose.RESAMPLING, seed=seed), 1 - confidence
    claims, different = 0, 0
    for _ in range(repeats):
        drawn = [[_drawn_run(hits_SB, rng) for _ in range(seeds)] for _ in range(arms)]
        scores = {
            str(arm): Scores({s: float(run.mean()) for s, run in enumerate(runs)}, {})
            for arm, runs in enumerate(drawn)
        }
        found = decide(scores, against="0", confidence=confidence)
        claims += any(one.shown for one in found.values())
        different += mcnemar(drawn[0][0], drawn[1][0]).p < alpha
    low, high = stats.binom.ppf([0.005, 0.995], repeats, alpha)
    return FalseAlarms(repeats, claims, alpha, int(low), int(high), different / repeats)


def _drawn_run(hits_SB: Hits, rng: Rng) -> Hits:
    stored, images = hits_SB.shape
    one = hits_SB[rng.integers(stored)]
    mixed = hits_SB[rng.integers(stored, size=images), np.arange(images)]
    drawn: Hits = np.where(rng.random(images) < 0.5, one, mixed)
    return drawn
