"""Probes of any encoder on labelled shards: features once, then every question, offline."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mimkit.classifier_io import weights_digest
from mimkit.data.class_labels import Classes, agreed_classes, notes_on_classes
from mimkit.data.doubles import Double, doubles
from mimkit.data.loader import eval_loader
from mimkit.data.sampler import first_samples
from mimkit.data.sources import SOURCES, Source
from mimkit.data.subset import SubsetSource
from mimkit.data.views import CenterView
from mimkit.downstream.feature_cache import cached
from mimkit.downstream.features import (
    Allocate,
    Extracted,
    Features,
    encoder_features,
    extract,
    in_memory,
)
from mimkit.downstream.probes import PROBES
from mimkit.downstream.scores import Scores, classification_scores
from mimkit.downstream.select import Selected, select
from mimkit.encoder_io import load_encoder
from mimkit.errors import UserError
from mimkit.export._pretrained import PretrainedEncoder
from mimkit.export._recipe import encoder_recipe, stem_recipe
from mimkit.runs import versions

_BATCH = 64
_DECIDING = ("mimkit", "torch", "pillow", "simplejpeg", "numpy")  # pixels and features come of them
Progress = Callable[[str, int, int], object]  # stage, done, total


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of an encoder.

    Attributes:
        train, test: patterns of labelled shards.
        probes: names of `PROBES`.
        layers: blocks, counted from 1; None for all.
        token_layers: blocks whose tokens the attentive probe looks at; None for 3/4 of the depth
            (BEiT-B's best one) and the last.
        image_size: side in pixels; None for the encoder's own.
        limit: images of each split, the first ones; None for all.
        feature_dir: where features are kept; None for memory.
        cache_dir: for indexes of shards in folders that cannot be written to.
        seed: of the images that are held out, and of the heads.
    """

    train: Sequence[str]
    test: Sequence[str]
    probes: Sequence[str]
    layers: Sequence[int] | None = None
    token_layers: Sequence[int] | None = None
    image_size: int | None = None
    limit: int | None = None
    feature_dir: Path | None = None
    cache_dir: Path = Path("~/.cache/mimkit")
    device: str = "cpu"
    workers: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What a probe found, its scores on the test split, and what its candidates' setting is."""

    selected: Selected
    scores: Scores
    setting: str


@dataclass(frozen=True)
class ProbeReport:
    """
    Attributes:
        encoder: what was probed, in words.
        depth: its blocks.
        image_size: side of the views in pixels.
        classes: of the data.
        train_images, test_images: how many were looked at.
        chance: share of the most common test label.
        shared: test images that are in the training split too.
        seconds: for features (0 where they were found) and for all.
        answers: by the probe's name.
    """

    encoder: str
    depth: int
    image_size: int
    classes: Classes
    train_images: int
    test_images: int
    chance: float
    shared: list[Double]
    seconds: dict[str, float]
    answers: dict[str, Answer]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "encoder": self.encoder, "image_size": self.image_size,
            "classes": self.classes.num, "train_images": self.train_images,
            "test_images": self.test_images, "chance": self.chance,
            "shared_images": len(self.shared),
            "shared_keys": [double.key for double in self.shared],
            "seconds": self.seconds,
            "probes": {name: _record(answer) for name, answer in self.answers.items()},
        }  # fmt: skip


def probe_encoder(
    path: Path,
    question: Question,
    *,
    say: Callable[[str], object],
    progress: Progress,
    answered: Callable[["ProbeReport", str], object] = lambda report, probe: None,
) -> ProbeReport:
    """Extracts features and puts every probe to them.

    Args:
        path: what `load_encoder` reads.
        say: told what happens, a line each. progress: told stage, done, total.
        answered: told what is known by then, and which probe was just answered.

    Raises:
        UserError: before features are made: no such encoder, probe, layer or size; images without
            labels; classes that differ; a class with too few images.
    """
    started = time.perf_counter()
    probes = {name: PROBES[name](device=question.device, seed=question.seed)
              for name in question.probes}  # fmt: skip
    encoder = load_encoder(path)
    size = _image_size(encoder, question)
    encoder = load_encoder(path, image_size=size)
    train, test = (_open(patterns, question) for patterns in (question.train, question.test))
    splits = {"--train": train, "--test": test}
    classes = agreed_classes(splits, stated=None)
    _check_counts(train, test)
    for note in notes_on_classes(splits, classes):
        say(f"note: {note}")
    look = _Look(encoder, size, question, needs_tokens=any(p.needs_tokens for p in probes.values()))
    shared = doubles(train, test, progress=partial(progress, "compare splits"))
    begun = time.perf_counter()
    train_features, test_features = (
        look.features(source, name, say=say, progress=progress)
        for name, source in (("train", train), ("test", test))
    )
    label_B = test_features.label_B
    report = ProbeReport(
        look.said(path), encoder.encoder.depth, size, classes, len(train), len(test),
        float(label_B.bincount().max() / len(label_B)), shared,
        {"features": time.perf_counter() - begun}, {},
    )  # fmt: skip
    made_by = {"encoder": str(path), "weights": look.digest}
    for name, probe in probes.items():

        def told(stage: str, done: int, total: int, probing: str = name) -> None:
            progress(f"{probing}: {stage}", done, total)

        found = select(probe, train_features, test_features, num_classes=classes.num,
                       seed=question.seed, progress=told, source=test.digest,
                       classes=classes.names, made_by={**made_by, "probe": name})  # fmt: skip
        report.answers[name] = Answer(
            found, classification_scores(found.predictions), probe.setting
        )
        report.seconds["all"] = time.perf_counter() - started
        answered(report, name)
    return report


def _open(patterns: Sequence[str], question: Question) -> Source:
    source: Source = SOURCES["shards"](shards=list(patterns), cache_dir=question.cache_dir)
    if question.limit is None or question.limit >= len(source):
        return source
    return SubsetSource(source, first_samples(source.sets, question.limit))


def _image_size(encoder: PretrainedEncoder, question: Question) -> int:
    height, width = encoder.image_size
    if question.image_size is not None:
        return question.image_size
    if height != width:
        raise UserError(f"the encoder is for {height}x{width} pixels, and probes look at squares; "
                        "give --image-size")  # fmt: skip
    return height


def _check_counts(train: Source, test: Source) -> None:
    """Every class of the test split can be learnt, and one image of it can choose."""
    counts = torch.from_numpy(train.labels).bincount()
    tested = torch.from_numpy(test.labels).bincount().nonzero()[:, 0].tolist()
    if unknown := [label for label in tested if label >= len(counts) or not counts[label]]:
        raise UserError(
            f"{len(unknown)} classes of --test have no image in --train, such as {unknown[:5]}; "
            "give splits of one data set, or a larger --limit"
        )
    if scarce := (counts == 1).nonzero()[:, 0].tolist():
        raise UserError(
            f"{len(scarce)} classes have a single image in --train, such as {scarce[:5]}; one of "
            "each class is held out to choose by: give at least two of each"
        )


class _Look:
    """Features of one encoder, kept on disk where the question has a folder for them."""

    def __init__(
        self, encoder: PretrainedEncoder, size: int, question: Question, *, needs_tokens: bool
    ) -> None:
        self._encoder, self._size, self._question = encoder, size, question
        depth = encoder.encoder.depth
        self.layers = _blocks(question.layers, "--layers", depth) or tuple(range(1, depth + 1))
        token_layers = _blocks(question.token_layers, "--token-layers", depth)
        self.token_layers = () if not needs_tokens else (
            token_layers or tuple(sorted({-(-3 * depth // 4), depth}))
        )  # fmt: skip
        self.digest = weights_digest(encoder.image_encoder.state_dict())

    def said(self, path: Path) -> str:
        """The encoder in a line."""
        encoder, stem = self._encoder.encoder, self._encoder.stem
        return (f"{path}: {stem.name} stem, width {encoder.width}, {encoder.depth} blocks, "
                f"patches of {stem.patch_size}")  # fmt: skip

    def features(
        self, source: Source, split: str, *, say: Callable[[str], object], progress: Progress
    ) -> Features:
        """Found or made; told which."""
        make = partial(self._extract, source, split, progress)
        folder = self._question.feature_dir
        if folder is None:
            found = make(in_memory)
        else:
            found = cached(folder.expanduser(), self._facts(source), make,
                           say=lambda text: say(f"{split} {text}"))  # fmt: skip
        return Features(found.arrays["pooled"], self.layers, found.label_B, found.index_B,
                        found.arrays.get("tokens"), self.token_layers)  # fmt: skip

    def _facts(self, source: Source) -> dict[str, Any]:
        """All that features depend on."""
        encoder = self._encoder
        return {
            "weights": self.digest,
            "recipe": [stem_recipe(encoder.stem), encoder_recipe(encoder.encoder)],
            "normalisation": [list(values) for values in encoder.normalisation],
            "images": source.digest,
            "view": {"centre_square": self._size, "interpolation": "bicubic", "exif": "ignore"},
            "layers": list(self.layers),
            "token_layers": list(self.token_layers),
            "device": torch.device(self._question.device).type,
            "versions": {name: versions().get(name, "") for name in _DECIDING},
        }

    def _extract(
        self, source: Source, split: str, progress: Progress, allocate: Allocate
    ) -> Extracted:
        done, stage = 0, f"features of {split}"

        def told(images: int) -> None:
            nonlocal done
            done += images
            progress(stage, done, len(source))

        batches = eval_loader(
            source=source, view=CenterView(image_size=self._size), mask=None, seed=0,
            batch_size=_BATCH, rank=0, world=1, workers=self._question.workers,
        )  # fmt: skip
        look = encoder_features(
            self._encoder.image_encoder, layers=self.layers, token_layers=self.token_layers,
            device=torch.device(self._question.device), **self._encoder.normalisation._asdict(),
        )  # fmt: skip
        return extract(look, batches, num_images=len(source), allocate=allocate, progress=told)


def _blocks(asked: Sequence[int] | None, flag: str, depth: int) -> tuple[int, ...]:
    if asked is None:
        return ()
    if bad := [block for block in asked if not 1 <= block <= depth]:
        raise UserError(f"{flag} names block {bad[0]}, and the encoder has 1..{depth}")
    return tuple(sorted(set(asked)))


def _record(answer: Answer) -> dict[str, Any]:
    found = answer.selected
    return {
        "chosen": found.best.candidate._asdict(),
        "validation_top1": found.best.top1,
        "validation_images": found.validation_images,
        "train_images": found.train_images,
        "seconds": dict(found.seconds),
        "table": [{**tried.candidate._asdict(), "validation_top1": tried.top1}
                  for tried in found.table],
        "test": answer.scores.record(),
    }  # fmt: skip
