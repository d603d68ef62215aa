"""Scores against scikit-learn, torchmetrics, statsmodels and closed forms."""

import numpy as np
import pytest
import torch
from sklearn import metrics
from test_predictions import make_predictions

from mimkit.downstream.predictions import Predictions, from_logits
from mimkit.downstream.scores import (
    calibration,
    classification_scores,
    confusion_matrix,
    multi_label_accuracy,
    share,
)


def _drawn(*, images: int = 500, classes: int = 12) -> tuple[torch.Tensor, Predictions]:
    """Logits, and what is kept of them; the last class has no image."""
    draw = torch.Generator().manual_seed(2)
    label_B = torch.randint(classes - 1, (images,), generator=draw)
    logit_BV = 2 * torch.randn(images, classes, generator=draw)
    logit_BV[torch.arange(images), label_B] += 2
    return logit_BV, from_logits(
        logit_BV, label_B=label_B, index_B=torch.arange(images), source="x"
    )


def test_equal_to_scikit_learn() -> None:
    logit_BV, predictions = _drawn()
    scores, label_B = classification_scores(predictions), predictions.label_B.numpy()
    probability_BV, guess_B = logit_BV.double().softmax(1).numpy(), logit_BV.argmax(1).numpy()
    every = np.arange(12)
    assert scores.top5 is not None
    assert scores.top1.value == metrics.accuracy_score(label_B, guess_B)
    assert scores.top5.value == metrics.top_k_accuracy_score(label_B, probability_BV, k=5,
                                                             labels=every)  # fmt: skip
    seen = np.isin(guess_B, label_B)  # scikit-learn warns of guesses that are no label
    assert not seen.all()
    recall = metrics.recall_score(label_B, guess_B, labels=every[:-1], average=None)
    assert scores.balanced == pytest.approx(recall.mean())
    assert scores.class_accuracy_V[:-1].numpy() == pytest.approx(recall)
    assert scores.class_accuracy_V[-1].isnan() and scores.class_total_V[-1] == 0
    expected = metrics.log_loss(label_B, probability_BV, labels=every)
    assert scores.nll == pytest.approx(expected, rel=1e-6)
    matrix = metrics.confusion_matrix(label_B, guess_B, labels=every)
    assert np.array_equal(confusion_matrix(predictions).numpy(), matrix)


def test_calibration_equals_torchmetrics() -> None:
    from torchmetrics.functional.classification import multiclass_calibration_error

    logit_BV, predictions = _drawn()
    expected = multiclass_calibration_error(logit_BV.softmax(1), predictions.label_B, 12, n_bins=15)
    assert classification_scores(predictions).ece == pytest.approx(float(expected), abs=1e-6)


def test_certain_and_always_right_is_calibrated() -> None:
    every = torch.arange(4)
    predictions = from_logits(200 * torch.eye(4), label_B=every, index_B=every, source="x")
    assert classification_scores(predictions).ece == 0
    assert calibration(predictions).share_K.tolist() == [0.0] * 14 + [1.0]


def test_interval_equals_wilsons_formula_and_statsmodels() -> None:
    found = share(torch.arange(50) < 41)
    z, p, n = 1.959963984540054, 41 / 50, 50
    centre, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    assert found.low == pytest.approx((centre - half) / (1 + z * z / n))
    assert found.high == pytest.approx((centre + half) / (1 + z * z / n))
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    expected = proportion.proportion_confint(41, 50, method="wilson")
    assert (found.low, found.high) == pytest.approx(expected)
    assert str(found) == f"82.00% [{found.low:.2%}, {found.high:.2%}]"


def test_no_top_5_of_five_classes() -> None:
    assert classification_scores(make_predictions(classes=5)).top5 is None
    assert classification_scores(make_predictions(classes=6)).top5 is not None


def test_record_is_json_without_nan() -> None:
    import json

    _, predictions = _drawn()
    text = json.dumps(classification_scores(predictions).record(), allow_nan=False)
    record = json.loads(text)
    assert record["images"] == 500 and record["class_accuracy"][-1] is None
    assert record["top1"]["low"] < record["top1"]["value"] < record["top1"]["high"]


def test_several_right_answers_and_none() -> None:
    predictions = make_predictions(images=6)
    best = predictions.best_BK[:, 0].tolist()
    labels = [[best[0]], [best[1], 99], [99], [], [98, 99], [99, best[5]]]
    found = multi_label_accuracy(predictions, labels)
    assert (found.hits, found.total) == (3, 5)
