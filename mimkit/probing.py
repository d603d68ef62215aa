"""The probe at the end of a run: trained encoder, untrained encoder, raw pixels, side by side."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mimkit import build
from mimkit.batch import NO_LABEL
from mimkit.config import Config
from mimkit.data.loader import BatchLoader, eval_loader
from mimkit.data.sources import Source
from mimkit.downstream.knn import (
    Features,
    encoder_features,
    knn_accuracy,
    pixel_features,
    recalibrate,
)
from mimkit.models.encoder import ImageEncoder


def probe(
    config: Config,
    weights: dict[str, Tensor],
    train: Source,
    heldout: Source | None,
    *,
    device: torch.device,
    workers: int,
) -> dict[str, Any]:
    """kNN accuracies, or `knn_skipped` with the reason where there are no labels."""
    if heldout is None or (train.labels == NO_LABEL).any() or (heldout.labels == NO_LABEL).any():
        return {"knn_skipped": "the shards have no labels" if heldout else "data.heldout is null"}
    settings = config.probe
    splits = {"train": (train, settings.train_limit), "heldout": (heldout, settings.heldout_limit)}

    def batches(split: str) -> BatchLoader:
        source, limit = splits[split]
        return eval_loader(source=source, view=build.build_probe_view(config.data), mask=None,
                           seed=config.seed, batch_size=64, rank=0, world=1, workers=workers,
                           limit=limit)  # fmt: skip

    def accuracy(features: dict[str, Features]) -> float:
        return knn_accuracy(features["train"], features["heldout"], neighbours=settings.neighbours)

    def of_encoder(encoder: ImageEncoder) -> float:
        return accuracy({
            split: encoder_features(encoder, batches(split), pooling=settings.pooling,
                                    depth=settings.depth, mean=config.data.mean,
                                    std=config.data.std, device=device)
            for split in splits
        })  # fmt: skip

    trained, untrained = (_model(config, weights) for _ in range(2))
    trained.load_state_dict(weights)
    recalibrate(untrained.image_encoder, batches("train"), mean=config.data.mean,
                std=config.data.std, device=device)  # fmt: skip
    return {
        "knn_top1": of_encoder(trained.image_encoder),
        "knn_top1_untrained": of_encoder(untrained.image_encoder),
        "knn_top1_pixels": accuracy({split: pixel_features(batches(split)) for split in splits}),
        "knn_chance": float(np.bincount(heldout.labels).max() / len(heldout)),
    }


def _model(config: Config, weights: dict[str, Tensor]) -> Any:
    return build.build_model(config, prediction_dim=len(weights["head.bias"]))
