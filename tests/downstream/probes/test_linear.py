"""The linear probe against scikit-learn's logistic regression."""

import numpy as np
import pytest
import torch
from drawn import NUM_CLASSES, draw_features
from sklearn.linear_model import LogisticRegression

from mimkit.downstream.probes import Candidate, Candidates, all_rows
from mimkit.downstream.probes.linear import Linear


@pytest.mark.parametrize("pooling", ["cls", "cls+mean"])
def test_equal_to_logistic_regression(pooling: str) -> None:
    """The same convex problem: mean cross-entropy + |w|^2 / (2 C n) on standardised features."""
    train, test = draw_features(120, seed=0), draw_features(80, seed=1)
    decay, rows = 0.01, all_rows(train)
    probe = Linear(weight_decay=decay, least=500)
    found = probe.logits(Candidates((2, 4), (pooling, "mean"), (0.1, 0.2)), train, rows, test,
                         all_rows(test), num_classes=NUM_CLASSES,
                         progress=lambda done, total: None)  # fmt: skip
    x_BF, judged_BF = train.of(4, pooling).numpy(), test.of(4, pooling).numpy()
    mean_F, scale_F = x_BF.mean(0), np.sqrt(x_BF.var(0) + 1e-6)
    judge = LogisticRegression(C=1 / (decay * len(x_BF)), tol=1e-8, max_iter=2000)
    judge.fit((x_BF - mean_F) / scale_F, train.label_B.numpy())
    expected = judge.predict_proba((judged_BF - mean_F) / scale_F)
    for rate in (0.1, 0.2):
        probability_BV = found[Candidate(4, pooling, rate)].softmax(1).numpy()
        np.testing.assert_allclose(probability_BV, expected, atol=2e-3)


def test_rates_differ_and_batches_are_drawn() -> None:
    train = draw_features(300, seed=0)
    probe = Linear(epochs=1, least=3)
    candidates = Candidates((4,), ("cls",), (1e-4, 1e-1))
    found = probe.logits(candidates, train, all_rows(train), train, all_rows(train),
                         num_classes=NUM_CLASSES, progress=lambda done, total: None)  # fmt: skip
    slow, fast = found.values()
    assert slow.abs().max() < 0.01 < fast.abs().max()
    assert torch.isfinite(fast).all()
