"""The numbers of an evaluation, all of them functions of the predictions for each image."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mimkit.downstream.predictions import Predictions

BINS = 15  # of confidence, as in Guo et al. 2017


class Share(NamedTuple):
    """`hits` of `total`, with Wilson's interval: a 95 % one, unless asked otherwise."""

    hits: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.hits / self.total

    def __str__(self) -> str:
        return f"{self.value:.2%} [{self.low:.2%}, {self.high:.2%}]"

    def record(self) -> dict[str, float]:
        """For JSON."""
        return {"value": self.value, "low": self.low, "high": self.high, "hits": self.hits,
                "total": self.total}  # fmt: skip


@dataclass(frozen=True)
class Scores:
    """
    Attributes:
        top1: share of images whose best class is the label.
        top5: share whose label is among the best five; None with five classes or fewer.
        balanced: mean over the classes that occur of their accuracies.
        nll: mean negative log-probability of the labels, nats.
        ece: expected calibration error: mean distance of confidence and accuracy, 0..1.
        class_accuracy_V: accuracy of each class; NaN for one without an image.
        class_total_V: images of each class.
    """

    top1: Share
    top5: Share | None
    balanced: float
    nll: float
    ece: float
    class_accuracy_V: Tensor
    class_total_V: Tensor

    def record(self) -> dict[str, Any]:
        """For JSON; classes without an image are null."""
        accuracies = [None if math.isnan(a) else a for a in self.class_accuracy_V.tolist()]
        return {
            "images": self.top1.total,
            "top1": self.top1.record(),
            "top5": self.top5.record() if self.top5 else None,
            "balanced_accuracy": self.balanced,
            "nll": self.nll,
            "ece": self.ece,
            "class_accuracy": accuracies,
            "class_images": self.class_total_V.tolist(),
        }


def classification_scores(predictions: Predictions) -> Scores:
    """Every image counts once; intervals are about the images, not about seeds of training."""
    correct_B = predictions.correct
    accuracy_V, total_V = _of_classes(predictions)
    return Scores(
        top1=share(correct_B),
        top5=share(predictions.among_best) if predictions.num_classes > 5 else None,
        balanced=float(accuracy_V.nanmean()),
        nll=-float(predictions.log_probability_B.double().mean()),
        ece=calibration(predictions).error,
        class_accuracy_V=accuracy_V,
        class_total_V=total_V,
    )


def share(hit_B: Tensor, *, confidence: float = 0.95) -> Share:
    """Of a boolean tensor, with Wilson's score interval (Wilson 1927), which stays in [0, 1]."""
    from scipy.stats import binomtest

    hits, total = int(hit_B.sum()), len(hit_B)
    found = binomtest(hits, total).proportion_ci(confidence, method="wilson")
    return Share(hits, total, float(found.low), float(found.high))


def _of_classes(predictions: Predictions) -> tuple[Tensor, Tensor]:
    """Accuracy (float64) and number of images of each class."""
    label_B, num = predictions.label_B, predictions.num_classes
    total_V = label_B.bincount(minlength=num)
    hits_V = label_B[predictions.correct].bincount(minlength=num)
    return hits_V.double() / total_V, total_V  # 0 / 0 is NaN


class Calibration(NamedTuple):
    """Of each bin of confidence, ]k/15, (k+1)/15]; NaN where it is empty."""

    confidence_K: Tensor
    accuracy_K: Tensor
    share_K: Tensor  # of all images

    @property
    def error(self) -> float:
        """ECE: mean over images of the distance between their bin's confidence and accuracy."""
        return float((self.share_K * (self.confidence_K - self.accuracy_K).abs()).nansum())


def calibration(predictions: Predictions, *, bins: int = BINS) -> Calibration:
    """Whether images said to be right with probability p are right that often.

    Guo et al. 2017, section 2: bins of equal width.
    """
    confidence_B = predictions.confidence.double()
    bin_B = (confidence_B * bins).ceil().long().clamp(1, bins) - 1
    count_K = bin_B.bincount(minlength=bins)
    confidence_K, accuracy_K = (
        bin_B.bincount(value_B, minlength=bins).double() / count_K
        for value_B in (confidence_B, predictions.correct.double())
    )
    return Calibration(confidence_K, accuracy_K, count_K.double() / len(predictions))


def confusion_matrix(predictions: Predictions) -> Tensor:
    """count_VV int64: rows are labels, columns what was predicted."""
    num = predictions.num_classes
    cell_B = predictions.label_B * num + predictions.best_BK[:, 0]
    return cell_B.bincount(minlength=num * num).view(num, num)


def multi_label_accuracy(predictions: Predictions, labels: Sequence[Sequence[int]]) -> Share:
    """Share of images whose best class is one of those that people see in them.

    The protocol of ImageNet ReaL (Beyer et al. 2020): images without any such label are left out.

    Args:
        labels: for each row of `predictions`.
    """
    best = predictions.best_BK[:, 0].tolist()
    hits = [guess in found for guess, found in zip(best, labels, strict=True) if found]
    return share(torch.tensor(hits))
