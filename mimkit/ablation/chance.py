"""Arms that did not learn: they are right no more often than somebody who names one class."""

from collections.abc import Mapping
from typing import Any

import torch

from mimkit.ablation.comparison import Scores
from mimkit.downstream.predictions import Predictions


def most_common_share(found: Predictions) -> float:
    """Share of the images whose class is the most common one: what naming it every time gets."""
    return float(torch.bincount(found.label_B).max()) / len(found)


def at_chance(accuracy: Mapping[Any, float], share: float | None) -> str:
    """`with every seed`, `with 1 of 3 seeds`: those whose accuracy is not above the share.

    Empty where there is none, or the share is not on record.
    """
    low = 0 if share is None else sum(one <= share for one in accuracy.values())
    if not low:
        return ""
    seeds = f"{low} of {len(accuracy)} seeds"
    return f"with {'every seed' if low == len(accuracy) else seeds}"


def chance_sentences(scores: Mapping[str, Scores], share: float | None) -> list[str]:
    """One, of the arms at chance and with how many of their seeds; none where no arm is."""
    found = {arm: at_chance(one.accuracy, share) for arm, one in scores.items()}
    parts = [f"{arm} {seeds}" for arm, seeds in found.items() if seeds]
    if share is None or not parts:
        return []
    return [
        f"At chance: {', '.join(parts)}. That is right on no more held-out images than the most "
        f"common class has, {100 * share:.2f} %: such a run has not learned, and what is said of "
        "its arm is about that."
    ]
