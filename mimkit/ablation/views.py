"""The same runs at equal steps, equal FLOPs and equal time: training loss read off the curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mimkit.ablation.intervals import Interval, mean_interval

Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class BudgetView:
    """Training loss of each arm where all have spent the same.

    Curves are cut at the smallest budget that every arm reached. A run that is cut was meant to go
    on: its learning rate had not come down, which a run of that length would have done.

    Attributes:
        budget: steps, flops, or time.
        amount: what every arm had spent: steps, 1e15 FLOPs (a multiply-add once), or seconds of one
            thread.
        loss: of each arm, mean over seeds with its interval.
    """

    budget: str
    amount: float
    loss: dict[str, Interval]


def budget_views(
    curves: Mapping[str, Sequence[Curve]],
    prices: Mapping[str, Mapping[str, float]],
    *,
    confidence: float,
) -> list[BudgetView]:
    """
    Args:
        curves: of each arm, one a seed.
        prices: budget -> arm -> what a step costs.
    """
    whole = {arm: [curve for curve in found if len(curve) > 1] for arm, found in curves.items()}
    whole = {arm: found for arm, found in whole.items() if found}
    if not whole:
        return []
    return [_view(budget, price, whole, confidence) for budget, price in prices.items()]


def _view(
    budget: str,
    price: Mapping[str, float],
    curves: Mapping[str, Sequence[Curve]],
    confidence: float,
) -> BudgetView:
    last = {arm: min(curve[-1][0] for curve in found) for arm, found in curves.items()}
    amount = min(steps * price[arm] for arm, steps in last.items())
    loss = {
        arm: mean_interval(np.array([_at(curve, amount / price[arm]) for curve in found]),
                           confidence=confidence)
        for arm, found in curves.items()
    }  # fmt: skip
    return BudgetView(budget, amount, loss)


def _at(curve: Curve, step: float) -> float:
    steps, losses = zip(*curve, strict=True)
    return float(np.interp(step, steps, losses))
