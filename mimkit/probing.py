"""The probe at the end of a run: trained encoder, untrained encoder, raw pixels, side by side."""

from typing import Any

import torch
from torch import Tensor

from mimkit import build
from mimkit.batch import NO_LABEL
from mimkit.config import Config
from mimkit.data.loader import BatchLoader, eval_loader
from mimkit.data.sources import Source
from mimkit.downstream.knn import (
    Extractor,
    encoder_features,
    extract,
    knn_accuracy,
    pixel_features,
    recalibrate,
)
from mimkit.models.mim import MaskedImageModel

_CALIBRATION = 512  # images for the untrained encoder's BatchNorm


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
    does, for their first images to be a fair sample.
    """
    if heldout is None or (train.labels == NO_LABEL).any() or (heldout.labels == NO_LABEL).any():
        return {"knn_skipped": "the shards have no labels" if heldout else "data.heldout is null"}
    settings = config.probe
    pixels = {"mean": config.data.mean, "std": config.data.std}

    def batches(source: Source, limit: int) -> BatchLoader:
        return eval_loader(source=source, view=build.build_probe_view(config.data), mask=None,
                           seed=config.seed, batch_size=64, rank=0, world=1, workers=workers,
                           limit=limit)  # fmt: skip

    trained, untrained = (_model(config, weights) for _ in range(2))
    trained.load_state_dict(weights)
    recalibrate(untrained, batches(train, _CALIBRATION), device=device, **pixels)
    extractors: dict[str, Extractor] = {
        name: encoder_features(model.image_encoder, pooling=settings.pooling,
                               depth=settings.depth, device=device, **pixels)
        for name, model in {"knn_top1": trained, "knn_top1_untrained": untrained}.items()
    }  # fmt: skip
    extractors["knn_top1_pixels"] = pixel_features
    gallery = extract(extractors, batches(train, settings.train_limit))
    queries = extract(extractors, batches(heldout, settings.heldout_limit))
    labels = queries["knn_top1_pixels"].label_B
    return {
        name: knn_accuracy(gallery[name], queries[name], neighbours=settings.neighbours)
        for name in extractors
    } | {"knn_chance": float(labels.bincount().max() / len(labels))}


def _model(config: Config, weights: dict[str, Tensor]) -> MaskedImageModel:
    return build.build_model(config, prediction_dim=len(weights["head.bias"]))
