"""The probe at the end of a run: trained encoder, untrained encoder, raw pixels, side by side."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mimkit import build
from mimkit.batch import NO_LABEL, normalise
from mimkit.config import Config
from mimkit.data.loader import BatchLoader, eval_loader
from mimkit.data.sources import Source
from mimkit.downstream.knn import (
    Extractor,
    encoder_features,
    extract,
    knn_accuracy,
    pixel_features,
)
from mimkit.models.calibration import calibrate, has_frozen_statistics
from mimkit.models.mim import MaskedImageModel

CALIBRATION_IMAGES = 512  # for the statistics of BatchNorm


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
    settings = config.probe
    pixels = {"mean": config.data.mean, "std": config.data.std}

    def batches(source: Source, limit: int) -> BatchLoader:
        substitutes = config.data.on_bad_sample if source is train else "raise"
        return eval_loader(source=source, view=build.build_probe_view(config.data), mask=None,
                           seed=config.seed, batch_size=64, rank=0, world=1, workers=workers,
                           limit=limit, on_bad_sample=substitutes)  # fmt: skip

    def images(loader: BatchLoader) -> Iterator[Tensor]:
        for batch in loader:
            yield normalise(batch.patch_view_BCHW.to(device), **pixels)

    trained, untrained = (_model(config, weights) for _ in range(2))
    trained.load_state_dict(weights)
    for model in (trained, untrained):  # alike: an untrained stem has no statistics of its own
        if model is untrained or not has_frozen_statistics(model.stem):
            calibrate(model.stem.to(device), images(batches(train, CALIBRATION_IMAGES)))
    extractors: dict[str, Extractor] = {
        name: encoder_features(model.image_encoder, pooling=settings.pooling,
                               depth=settings.depth, device=device, **pixels)
        for name, model in {"knn_top1": trained, "knn_top1_untrained": untrained}.items()
    }  # fmt: skip
    extractors["knn_top1_pixels"] = pixel_features
    gallery = extract(extractors, batches(train, settings.train_limit))
    queries = extract(extractors, batches(heldout, settings.heldout_limit))
    labels = queries["knn_top1_pixels"].label_B
    accuracies = {
        name: knn_accuracy(gallery[name], queries[name], neighbours=settings.neighbours)
        for name in extractors
    }
    return accuracies | {
        "knn_chance": float(labels.bincount().max() / len(labels)),
        "knn_train_images": len(gallery["knn_top1_pixels"].label_B),
        "knn_heldout_images": len(labels),
    }


def _no_knn(train: Source, heldout: Source | None) -> str | None:
    """Why a kNN accuracy would mean nothing, if it would."""
    if heldout is None:
        return "data.heldout is null"
    if (train.labels == NO_LABEL).any() or (heldout.labels == NO_LABEL).any():
        return "the shards have no labels"
    if train.classes and heldout.classes and train.classes != heldout.classes:
        return (
            f"labels mean different classes: {_few(train.classes)} in data.train, "
            f"{_few(heldout.classes)} in data.heldout (their classes.json)"
        )
    if len(set(heldout.labels.tolist())) < 2:
        return "all held-out images have the same label"
    return None


def _few(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def _model(config: Config, weights: dict[str, Tensor]) -> MaskedImageModel:
    return build.build_model(config, prediction_dim=len(weights["head.bias"]))
