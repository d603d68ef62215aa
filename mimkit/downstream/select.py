"""The protocol of every probe: choose on images held out of the training split, then test once."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mimkit.downstream.features import Features
from mimkit.downstream.predictions import Predictions, from_logits
from mimkit.downstream.probes import Candidate, Candidates, Probe, all_rows
from mimkit.errors import UserError
from mimkit.random import Purpose, generator

VALIDATION = 0.2  # of every class of the training split


class Tried(NamedTuple):
    """A candidate and the share of the validation images that it got right."""

    candidate: Candidate
    top1: float


@dataclass(frozen=True)
class Selected:
    """What a probe found.

    Attributes:
        table: every candidate on the validation images.
        best: the one that was taken: the highest share; of equals the one that stands first.
        validation_images, train_images: how many chose, and how many the winner learnt from.
        predictions: the winner's, of the test split, after learning from all training images.
        seconds: for choosing, and for the winner.
    """

    table: list[Tried]
    best: Tried
    validation_images: int
    train_images: int
    predictions: Predictions
    seconds: Mapping[str, float] = field(default_factory=dict)


def select(
    probe: Probe,
    train: Features,
    test: Features,
    *,
    num_classes: int,
    seed: int,
    progress: Callable[[str, int, int], object],
    source: str,
    classes: tuple[str, ...] = (),
    made_by: Mapping[str, str] | None = None,
) -> Selected:
    """Layer, pooling and setting by validation accuracy, then the test split with those.

    Args:
        progress: told a stage (choose, test), how far it is, and how far it goes.
        source: digest of the test split.

    Raises:
        UserError: a class has too few images to hold one out.
    """
    fit, validation = split(train.label_B, seed=seed)
    started = time.perf_counter()
    outputs = probe.logits(
        probe.candidates(train), train, fit, train, validation, num_classes=num_classes,
        progress=partial(progress, "choose"),
    )  # fmt: skip
    label_B = train.label_B[validation]
    table = [Tried(candidate, float((logit_BV.argmax(1) == label_B).double().mean()))
             for candidate, logit_BV in outputs.items()]  # fmt: skip
    best = max(table, key=lambda tried: tried.top1)
    chosen = time.perf_counter()
    [logit_BV] = probe.logits(
        Candidates.only(best.candidate), train, all_rows(train), test,
        all_rows(test), num_classes=num_classes, progress=partial(progress, "test"),
    ).values()  # fmt: skip
    seconds = {"choose": chosen - started, "test": time.perf_counter() - chosen}
    predictions = from_logits(logit_BV, label_B=test.label_B, index_B=test.index_B, source=source,
                              classes=classes, made_by=made_by)  # fmt: skip
    return Selected(table, best, len(validation), len(train), predictions, seconds)


def split(label_B: Tensor, *, seed: int, fraction: float = VALIDATION) -> tuple[Tensor, Tensor]:
    """(rows to learn from, rows to choose by): about `fraction` of every class, at least one.

    Raises:
        UserError: a class has one image only.
    """
    order = torch.from_numpy(generator(Purpose.PROBE, seed=seed).permutation(len(label_B)))
    validation = []
    for label in label_B.bincount().nonzero()[:, 0].tolist():
        rows = order[label_B[order] == label]
        if len(rows) < 2:
            raise UserError(
                f"class {label} has one training image, and layer, pooling and rate are chosen on "
                "images held out of every class; give at least two of each class in --train"
            )
        validation.append(rows[: max(1, round(fraction * len(rows)))])
    held = torch.cat(validation).sort().values
    kept = torch.ones(len(label_B), dtype=torch.bool)
    kept[held] = False
    return kept.nonzero()[:, 0], held
