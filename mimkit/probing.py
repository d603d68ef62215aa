"""kNN probes of a pretraining: on the way, and at its end beside untrained encoder and pixels."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimkit import build
from mimkit.batch import NO_LABEL, Batch, normalise
from mimkit.config import Config
from mimkit.data.loader import BatchLoader, eval_loader
from mimkit.data.sampler import first_samples
from mimkit.data.sources import Source
from mimkit.downstream.features import (
    Extracted,
    Extractor,
    encoder_features,
    extract,
    pixel_features,
    summed,
)
from mimkit.downstream.probes.knn import knn_votes
from mimkit.errors import UserError
from mimkit.models.calibration import calibrate, has_frozen_statistics
from mimkit.models.mim import MaskedImageModel

CALIBRATION_IMAGES = 512  # for the statistics of BatchNorm
_BATCH = 64
_Part = Callable[[Batch], Tensor]  # Batch -> pooled_B1PD


class Ranks(NamedTuple):
    """Who shares the work of a probe; alone without other ranks."""

    device: torch.device
    workers: int
    rank: int = 0
    world: int = 1
    sum: Callable[[Tensor], Tensor] = lambda tensor: tensor


def probe(
    config: Config,
    weights: dict[str, Tensor],
    train: Source,
    heldout: Source | None,
    *,
    device: torch.device,
    workers: int,
) -> dict[str, Any]:
    """kNN accuracies on the first images of each split, or `knn_skipped` with the reason.

    `heldout` is embedded or the user's; the shards of `train` should be shuffled, as make_shards
    does, for their first images to be a fair sample. Of several sets each gives its share.
    """
    if (reason := _no_knn(train, heldout)) is not None:
        return {"knn_skipped": reason}
    assert heldout is not None
    look = _Look(config, train, heldout, Ranks(device, workers))
    trained, untrained = (_model(config, weights) for _ in range(2))
    trained.load_state_dict(weights)
    parts: dict[str, _Part] = {
        "knn_top1": look.encoder(trained),
        "knn_top1_untrained": look.encoder(untrained, trained=False),
        "knn_top1_pixels": lambda batch: pixel_features(batch)["pixels"],
    }
    found = look.accuracies(parts, config.probe.train_limit, config.probe.heldout_limit)
    return found.accuracy | {
        "knn_chance": float(found.heldout_B.bincount().max() / len(found.heldout_B)),
        "knn_train_images": len(found.train_B),
        "knn_heldout_images": len(found.heldout_B),
    }


def online_probe(
    config: Config, weights: dict[str, Tensor], train: Source, heldout: Source, *, ranks: Ranks
) -> dict[str, float]:
    """`online_knn_top1` on `probe.every_limit` images of each split, by a model of its own.

    All ranks must call it, each with the whole weights; they share the images. The model that is
    trained, its buffers and its random numbers are not touched.
    """
    look = _Look(config, train, heldout, ranks)
    model = _model(config, weights)
    model.load_state_dict(weights)
    limit = config.probe.every_limit
    return look.accuracies({"online_knn_top1": look.encoder(model)}, limit, limit).accuracy


def check_online(config: Config, train: Source, heldout: Source | None) -> None:
    """UserError where `probe.every` asks for what would mean nothing."""
    if config.probe.every is not None and (reason := _no_knn(train, heldout)) is not None:
        raise UserError(
            f"probe.every={config.probe.every} asks for kNN during training, but {reason}; set "
            "probe.every=null, or give labelled shards in data.train and data.heldout"
        )


class _Look:
    """Features of both splits as the configuration wants them, and what kNN makes of them."""

    def __init__(self, config: Config, train: Source, heldout: Source, ranks: Ranks) -> None:
        self._config, self._train, self._heldout, self._ranks = config, train, heldout, ranks
        self._pixels: dict[str, Any] = {"mean": config.data.mean, "std": config.data.std}

    def encoder(self, model: MaskedImageModel, *, trained: bool = True) -> _Part:
        """Batch -> pooled_B1PD after `probe.depth` of the blocks.

        The stem's batch statistics are measured on training images, for trained and untrained
        alike: an untrained stem has none of its own.
        """
        if not (trained and has_frozen_statistics(model.stem)):
            calibrate(model.stem.to(self._ranks.device), self._calibration_images())
        encoder = model.image_encoder
        block = math.ceil(self._config.probe.depth * encoder.encoder.depth)  # they count from 1
        look = encoder_features(encoder, layers=[block], device=self._ranks.device, **self._pixels)
        return lambda batch: look(batch)["pooled"]

    def accuracies(
        self, extractors: Mapping[str, _Part], train_limit: int, heldout_limit: int
    ) -> "_Found":
        """Of kNN on the first images of both splits, on all ranks."""

        def look(batch: Batch) -> dict[str, Tensor]:
            return {name: extractor(batch) for name, extractor in extractors.items()}

        gallery = self._extract(self._train, look, train_limit)
        queries = self._extract(self._heldout, look, heldout_limit)
        found = {name: self._accuracy(name, gallery, queries) for name in extractors}
        return _Found(found, gallery.label_B, queries.label_B)

    def _accuracy(self, name: str, gallery: Extracted, queries: Extracted) -> float:
        settings = self._config.probe
        train_BF, heldout_BF = (self._pooled(found.arrays[name]) for found in (gallery, queries))
        num_classes = int(max(gallery.label_B.max(), queries.label_B.max())) + 1
        vote_BV = knn_votes(train_BF, gallery.label_B, heldout_BF, num_classes=num_classes,
                            neighbours=[settings.neighbours])[settings.neighbours]  # fmt: skip
        return float((vote_BV.argmax(1) == queries.label_B).double().mean())

    def _pooled(self, pooled_B1PD: NDArray[np.float32]) -> Tensor:
        """Pixels are pooled in one way only."""
        number = ("mean", "cls").index(self._config.probe.pooling)
        return torch.from_numpy(pooled_B1PD[:, 0, number % pooled_B1PD.shape[2]])

    def _extract(self, source: Source, look: Extractor, limit: int) -> Extracted:
        ranks = self._ranks
        images = len(first_samples(source.sets, limit))
        own = extract(look, self._batches(source, limit, rank=ranks.rank, world=ranks.world),
                      num_images=images, rank=ranks.rank, world=ranks.world)  # fmt: skip
        return summed(own, lambda part: ranks.sum(part.to(ranks.device)).cpu())

    def _batches(self, source: Source, limit: int, *, rank: int, world: int) -> BatchLoader:
        data = self._config.data
        substitutes = data.on_bad_sample if source is self._train else "raise"
        return eval_loader(source=source, view=build.build_probe_view(data, "patches"), mask=None,
                           seed=self._config.seed, batch_size=_BATCH, rank=rank, world=world,
                           workers=self._ranks.workers, limit=limit,
                           on_bad_sample=substitutes)  # fmt: skip

    def _calibration_images(self) -> Iterator[Tensor]:
        """The same on every rank."""
        for batch in self._batches(self._train, CALIBRATION_IMAGES, rank=0, world=1):
            yield normalise(batch.patch_view_BCHW.to(self._ranks.device), **self._pixels)


class _Found(NamedTuple):
    """Accuracies by name, and the labels of what was looked at."""

    accuracy: dict[str, float]
    train_B: Tensor
    heldout_B: Tensor


def _no_knn(train: Source, heldout: Source | None) -> str | None:
    """Why a kNN accuracy would mean nothing, if it would."""
    if heldout is None:
        return "data.heldout is null"
    if (train.labels == NO_LABEL).any() or (heldout.labels == NO_LABEL).any():
        return "the shards have no labels"
    if train.classes and heldout.classes and train.classes != heldout.classes:
        return (
            f"labels mean different classes: {few(train.classes)} in data.train, "
            f"{few(heldout.classes)} in data.heldout (their classes.json)"
        )
    if len(set(heldout.labels.tolist())) < 2:
        return "all held-out images have the same label"
    return None


def few(names: list[str]) -> str:
    """How many, and the first of them."""
    return f"{len(names)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def _model(config: Config, weights: dict[str, Tensor]) -> MaskedImageModel:
    return build.build_model(config, prediction_dim=len(weights["head.bias"]))
