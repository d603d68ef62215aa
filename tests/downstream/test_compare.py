"""Comparisons against statsmodels' McNemar test and Agresti and Min's own formula."""

import pytest
import torch
from test_predictions import make_predictions

from mimkit.downstream.compare import compare
from mimkit.downstream.predictions import Predictions, from_logits


def _right(hits: torch.Tensor) -> Predictions:
    """Predictions of two classes, right where told."""
    label_B = torch.zeros(len(hits), dtype=torch.int64)
    logit_BV = torch.stack([hits.float(), 1 - hits.float()], 1)
    return from_logits(logit_BV, label_B=label_B, index_B=torch.arange(len(hits)), source="x")


def test_equal_to_statsmodels() -> None:
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    one, other = make_predictions(images=200, seed=0), make_predictions(images=200, seed=1)
    found = compare(one, other)
    table = [[found.both, found.only_one], [found.only_other, found.neither]]
    assert found.p == pytest.approx(tables.mcnemar(table, exact=True).pvalue)
    assert sum(map(sum, table)) == found.images == 200
    accuracies = [float(p.correct.double().mean()) for p in (one, other)]
    assert found.difference == pytest.approx(accuracies[0] - accuracies[1])


def test_interval_is_agresti_and_mins() -> None:
    """16 and 5 of 100 discordant: their formula, written out with 1/2 added to four cells."""
    hits = torch.arange(100)
    found = compare(_right(hits < 70), _right((hits < 54) | ((hits >= 70) & (hits < 75))))
    assert (found.both, found.only_one, found.only_other, found.neither) == (54, 16, 5, 25)
    p12, p21, n = 16.5 / 102, 5.5 / 102, 102
    half = 1.959963984540054 * ((p12 + p21 - (p12 - p21) ** 2) / n) ** 0.5
    assert (found.low, found.high) == pytest.approx((p12 - p21 - half, p12 - p21 + half))
    assert found.difference == pytest.approx(0.11)


def test_the_same_model_twice() -> None:
    one = make_predictions()
    found = compare(one, one)
    assert found.p == 1.0 and found.difference == 0 and found.low < 0 < found.high
