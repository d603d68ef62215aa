"""What a classifier said of each image: kept in one file, so that models can be compared by image.

`scores.classification_scores` makes every number of an evaluation out of it; `paired` is what
comparisons stand on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimkit.class_names import names_on_record
from mimkit.errors import UserError
from mimkit.files import atomic_file
from mimkit.weight_files import write_safetensors

FORMAT = "mimkit.predictions.1"
FILE = "predictions.safetensors"  # its usual name in a folder
BEST = 5  # classes that are kept of each image


@dataclass(frozen=True)
class Predictions:
    """One row for each image, in the order of the source. K is 5, or the number of classes if less.

    Attributes:
        index_B: int64, the image's number in its source; ascending, each once.
        label_B: int64, its class.
        best_BK: int64, the classes that were thought most probable, the best first.
        log_confidence_B: float32, log-probability (nats) of the best one.
        log_probability_B: float32, log-probability of the label.
        num_classes: how many there were to choose from.
        classes: their names, or empty.
        source: digest of the images (`Source.digest`).
        made_by: what made them, for people: model, settings, data.

    Raises:
        UserError: rows are no predictions: labels out of range, images twice, not finite.
    """

    index_B: Tensor
    label_B: Tensor
    best_BK: Tensor
    log_confidence_B: Tensor
    log_probability_B: Tensor
    num_classes: int
    source: str
    classes: tuple[str, ...] = ()
    made_by: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if (problem := _problem(self)) is not None:
            raise UserError(f"these are no predictions of {self.num_classes} classes: {problem}")

    def __len__(self) -> int:
        return len(self.index_B)

    @property
    def correct(self) -> Tensor:
        """bool (B,): the best class is the label."""
        return self.best_BK[:, 0] == self.label_B

    @property
    def among_best(self) -> Tensor:
        """bool (B,): the label is one of the K best; with more than five classes, top-5."""
        return (self.best_BK == self.label_B[:, None]).any(1)

    @property
    def confidence(self) -> Tensor:
        """float32 (B,): probability of the best class."""
        return self.log_confidence_B.exp()

    @property
    def probability(self) -> Tensor:
        """float32 (B,): probability of the label."""
        return self.log_probability_B.exp()

    def save(self, path: Path) -> None:
        """One safetensors file, whole or not at all; the rest is JSON in its metadata."""
        facts = {"num_classes": self.num_classes, "source": self.source,
                 "classes": self.classes, "made_by": dict(self.made_by or {})}  # fmt: skip
        metadata = {"mimkit_format": FORMAT, "predictions": json.dumps(facts)}
        tensors = {name: getattr(self, name) for name in _COLUMNS}
        with atomic_file(path) as temporary:
            write_safetensors(temporary, tensors, metadata=metadata)


_COLUMNS = ("index_B", "label_B", "best_BK", "log_confidence_B", "log_probability_B")


def load_predictions(path: Path) -> Predictions:
    """A file of `Predictions.save`, or the FILE in a folder; nothing in it is executed.

    Raises:
        UserError: there is none, it is damaged, or something else.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no {file}; mimkit evaluate and mimkit probe write such files "
                        "with --predictions")  # fmt: skip
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("mimkit_format") != FORMAT:
                raise UserError(f"{file} is '{metadata.get('mimkit_format')}', expected "
                                f"'{FORMAT}': a file that mimkit evaluate wrote")  # fmt: skip
            facts = json.loads(metadata["predictions"])
            columns = {name: opened.get_tensor(name) for name in _COLUMNS}
        facts["classes"] = names_on_record(facts["classes"])
        return Predictions(**columns, **facts)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is damaged: {error}; make the predictions again") from error


def _problem(found: Predictions) -> str | None:
    """What contradicts the promises of the class, if anything does."""
    lengths = {name: len(getattr(found, name)) for name in _COLUMNS}
    labels, best = found.label_B, found.best_BK
    if len(set(lengths.values())) != 1 or not len(found):
        return f"columns have lengths {lengths}"
    if best.shape[1] != min(BEST, found.num_classes):
        return f"{best.shape[1]} classes are kept of each image"
    if found.classes and len(found.classes) != found.num_classes:
        return f"{len(found.classes)} names of classes"
    for what, numbers in (("labels", labels), ("predicted classes", best)):
        if numbers.min() < 0 or numbers.max() >= found.num_classes:
            return f"{what} reach from {int(numbers.min())} to {int(numbers.max())}"
    if not (found.index_B.diff() > 0).all() or found.index_B[0] < 0:
        return "images are not numbered upwards"
    if not (found.log_confidence_B.isfinite() & found.log_probability_B.isfinite()).all():
        return "probabilities are not finite; the model gives no finite logits"
    return None


def from_logits(
    logit_BV: Tensor,
    *,
    label_B: Tensor,
    index_B: Tensor,
    source: str,
    classes: Sequence[str] = (),
    made_by: Mapping[str, str] | None = None,
) -> Predictions:
    """Of a whole split on the CPU, in any order; probabilities by softmax in float32.

    Raises:
        UserError: a label is no class of the model; a logit is not finite.
    """
    num_classes = logit_BV.shape[1]
    if label_B.min() < 0 or label_B.max() >= num_classes:
        raise UserError(
            f"labels reach from {int(label_B.min())} to {int(label_B.max())} (-1: none), but the "
            f"model knows {num_classes} classes, 0..{num_classes - 1}; give images of its classes"
        )
    order = index_B.argsort()
    log_BV = logit_BV[order].float().log_softmax(1)
    best = log_BV.topk(min(BEST, num_classes), dim=1)
    return Predictions(
        index_B=index_B[order],
        label_B=label_B[order],
        best_BK=best.indices,
        log_confidence_B=best.values[:, 0],
        log_probability_B=log_BV.gather(1, label_B[order, None])[:, 0],
        num_classes=num_classes,
        source=source,
        classes=tuple(classes),
        made_by=made_by,
    )


class Paired(NamedTuple):
    """Two models on the same images, in the same order: bool, whether each is right."""

    one_B: Tensor
    other_B: Tensor


def paired(one: Predictions, other: Predictions) -> Paired:
    """Both models' hits, image by image.

    Raises:
        UserError: they are about other images, labels or classes; names the difference.
    """
    if (difference := _difference(one, other)) is not None:
        raise UserError(f"the predictions cannot be compared image by image: {difference}; "
                        "evaluate both models on the same data")  # fmt: skip
    return Paired(one.correct, other.correct)


def _difference(one: Predictions, other: Predictions) -> str | None:
    for name in ("source", "num_classes", "classes"):
        first, second = getattr(one, name), getattr(other, name)
        if first != second and (name != "classes" or (first and second)):
            return f"{name} is {_short(first)} in one and {_short(second)} in the other"
    if len(one) != len(other) or not torch.equal(one.index_B, other.index_B):
        shared = len(set(one.index_B.tolist()) & set(other.index_B.tolist()))
        return f"{len(one)} and {len(other)} images, {shared} of them in both"
    if unlike := int((one.label_B != other.label_B).sum()):
        return f"{unlike} of {len(one)} images have another label"
    return None


def _short(value: object) -> str:
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return f"'{text if len(text) <= 60 else text[:57] + '...'}'"
