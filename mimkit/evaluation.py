"""A finetuned classifier on labelled shards, on any number of ranks: predictions, then numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mimkit.batch import Batch
from mimkit.classifier_io import Classifier, finetuned_folder, load_classifier
from mimkit.config import load_finetune_config
from mimkit.data.class_labels import agreed_classes, numbers_alone
from mimkit.data.known_sets import check_set, known_set, numbered_labels, real_labels
from mimkit.data.loader import eval_loader
from mimkit.data.resize import sides
from mimkit.data.sources import SOURCES, Source
from mimkit.data.views import CenterView
from mimkit.downstream.predictions import Predictions
from mimkit.downstream.scores import Scores, Share, classification_scores, multi_label_accuracy
from mimkit.errors import UserError
from mimkit.evaluation_notes import notes_on_training
from mimkit.models.classifier import ImageClassifier
from mimkit.models.resize import resized
from mimkit.train.classification_step import predict_all
from mimkit.train.runtimes import Runtime

AT_ONCE = 64  # images in one forward, on any number of ranks: so all round alike


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What to evaluate on, and how.

    Attributes:
        data: patterns of labelled shards.
        set_name: one of `KNOWN_SETS`, whose counts are checked; None for any set.
        real: ReaL's labels of ImageNet's validation images.
        image_size: height and width in pixels; None for the model's.
        crop: share of the short side that is shown; None for that of the model's training.
        cache_dir: for indexes of shards in folders that cannot be written to.
        workers: loader processes of each rank.
    """

    data: Sequence[str]
    set_name: str | None = None
    real: Path | None = None
    image_size: tuple[int, int] | None = None
    crop: float | None = None
    cache_dir: Path = Path("~/.cache/mimkit")
    workers: int = 0


@dataclass(frozen=True)
class Evaluated:
    """Attributes:
    predictions: of every image, on all ranks.
    scores: of them.
    real: share of images whose guess is one of ReaL's labels, where they were given.
    notes: what a person should know; what its training had to do with the images, rank 0 alone.
    """

    predictions: Predictions
    scores: Scores
    real: Share | None
    notes: list[str]


def evaluate(
    path: Path,
    asked: Evaluation,
    *,
    runtime: Runtime,
    progress: Callable[[str, int, int], object] = lambda stage, done, total: None,
) -> Evaluated:
    """All ranks call it and get the same.

    Args:
        path: the run folder of a finetuning, its `best`, or a folder of `mimkit merge`.

    Raises:
        UserError: before any work: no such model, images without labels, other classes than the
            model's, counts that are not the known set's, a size that is no multiple of the patch.
    """
    classifier, source = load_classifier(path), _open(asked, runtime)
    labels, notes = _labels(source, classifier, asked)
    if runtime.rank == 0 and (config := _run_config(path)) is not None:
        notes += notes_on_training(config, source)
    real = None if asked.real is None else real_labels(asked.real, source.keys)
    view = _view(path, classifier, asked)
    model = _sized(classifier, view)
    device = runtime.device
    batches = eval_loader(source=source, view=view, mask=None, seed=0, batch_size=AT_ONCE,
                          rank=runtime.rank, world=runtime.world, workers=asked.workers,
                          local_world=runtime.local_world)  # fmt: skip
    num_classes = classifier.model.head.out_features
    found = predict_all(
        model.to(device), _told(batches, labels, len(batches), progress),
        images=len(source), best=min(5, num_classes), device=device, sum_over_ranks=runtime.sum,
        **classifier.normalisation._asdict(),
    )  # fmt: skip
    predictions = Predictions(
        index_B=torch.arange(len(source)), label_B=torch.from_numpy(labels),
        best_BK=found.best_NK, log_confidence_B=found.log_confidence_N,
        log_probability_B=found.log_probability_N, num_classes=num_classes,
        source=source.digest, classes=classifier.classes,
        made_by={"model": str(path), "crop": f"{view.crop:g}", "set": str(asked.set_name)},
    )  # fmt: skip
    share = None if real is None else multi_label_accuracy(predictions, real)
    return Evaluated(predictions, classification_scores(predictions), share, notes)


def _open(asked: Evaluation, runtime: Runtime) -> Source:
    """Rank 0 first: it writes indexes where there are none yet."""
    if runtime.rank != 0:
        runtime.from_rank_0(None)
    source: Source = SOURCES["shards"](shards=list(asked.data), cache_dir=asked.cache_dir)
    if runtime.rank == 0:
        runtime.from_rank_0(None)
    return source


def _labels(
    source: Source, classifier: Classifier, asked: Evaluation
) -> tuple[NDArray[np.int64], list[str]]:
    """What the model calls the classes of the images, and notes."""
    found = agreed_classes({"DATA": source}, stated=None)
    num, names = classifier.model.head.out_features, classifier.classes
    notes = [] if asked.set_name is None else check_set(asked.set_name, source, classes=found.num)
    if found.num > num or (found.names and found.num != num):
        raise UserError(
            f"the model knows {num} classes and the images have {found.num}; evaluate it on the "
            "set it was finetuned for"
        )
    if asked.set_name is not None and known_set(asked.set_name).numbered:
        return numbered_labels(source), notes
    if names and found.names and found.names != names:
        place = next(i for i, pair in enumerate(zip(names, found.names, strict=True))
                     if pair[0] != pair[1])  # fmt: skip
        raise UserError(
            f"label {place} is '{names[place]}' to the model and '{found.names[place]}' in the "
            "images' classes.json; write the shards with the classes of the training set"
        )
    unnamed = [what for what, known in (("the model", names), ("DATA", found.names)) if not known]
    return source.labels, notes + ([numbers_alone(unnamed)] if unnamed else [])


def _run_config(path: Path) -> Path | None:
    """Of the finetuning that made the model, where its run folder is there to tell."""
    run = finetuned_folder(path)
    files = [] if run is None else [run / "config.yaml", run.parent / "config.yaml"]
    return next((file for file in files if file.exists()), None)


def _view(path: Path, classifier: Classifier, asked: Evaluation) -> CenterView:
    """That of the model's own training, where its run folder is there to tell."""
    config = _run_config(path)
    size = asked.image_size or classifier.image_size
    if asked.image_size is not None:
        patch = classifier.model.stem.patch_size
        if any(side % patch for side in asked.image_size):
            raise UserError(f"--image-size {asked.image_size[0]}x{asked.image_size[1]} is no "
                            f"multiple of the patch, {patch}")  # fmt: skip
    if config is None:
        return CenterView(image_size=size, crop=1.0 if asked.crop is None else asked.crop)
    data = load_finetune_config(config).data
    return CenterView(image_size=size, image_interpolation=data.interpolation, exif=data.exif,
                      crop=data.test_crop if asked.crop is None else asked.crop)  # fmt: skip


def _sized(classifier: Classifier, view: CenterView) -> ImageClassifier:
    """With positions for the views, interpolated where they are others."""
    model = classifier.model
    height, width = sides(view.image_size or classifier.image_size)
    encoder = resized(model.image_encoder, model.stem.grid(height, width))
    other = ImageClassifier(encoder, num_classes=model.head.out_features, pooling=model.pooling)
    other.load_state_dict({**other.state_dict(), **model.head_state()})
    return other.eval()


def _told(
    batches: Iterable[Batch],
    labels: NDArray[np.int64],
    total: int,
    progress: Callable[[str, int, int], object],
) -> Iterator[Batch]:
    """Batches with the model's labels."""
    label_N = torch.from_numpy(labels)
    for number, batch in enumerate(batches, start=1):
        yield batch._replace(label_B=label_N[batch.index_B.clamp(min=0)])
        progress("images", number, total)
