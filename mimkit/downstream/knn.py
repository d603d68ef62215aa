"""kNN on frozen features: the cheapest question one can put to an encoder."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mimkit.batch import Batch, normalise, to_unit
from mimkit.models.encoder import ImageEncoder


@dataclass(frozen=True)
class Features:
    """Features of the real images of a split, and their labels."""

    feature_BD: Tensor
    label_B: Tensor


def knn_accuracy(train: Features, heldout: Features, *, neighbours: int) -> float:
    """Share of held-out samples whose label gets the most votes of its nearest neighbours.

    Features are centred on the training mean; similarity is the cosine s, and each neighbour votes
    with exp(s / 0.07) (Wu et al. 2018, DINO's protocol).
    """
    k = min(neighbours, len(train.label_B))
    num_labels = int(max(train.label_B.max(), heldout.label_B.max())) + 1
    mean_D = train.feature_BD.mean(dim=0)
    train_BD = nn.functional.normalize(train.feature_BD - mean_D, dim=1)
    heldout_BD = nn.functional.normalize(heldout.feature_BD - mean_D, dim=1)
    correct = 0
    for first in range(0, len(heldout_BD), 256):
        feature_BD, label_B = heldout_BD[first : first + 256], heldout.label_B[first : first + 256]
        similarity_BK, nearest_BK = (feature_BD @ train_BD.T).topk(k, dim=1)
        votes = torch.zeros(len(feature_BD), num_labels)
        votes.scatter_add_(1, train.label_B[nearest_BK], (similarity_BK / 0.07).exp())
        correct += int((votes.argmax(dim=1) == label_B).sum())
    return correct / len(heldout.label_B)


@torch.no_grad()
def encoder_features(
    encoder: ImageEncoder,
    batches: Iterable[Batch],
    *,
    pooling: str,
    depth: float,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
) -> Features:
    """Features of every real (not padded) image: mean of its patch tokens, or its class token.

    Args:
        depth: share of the blocks to go through; 1 also goes through the last norm.
    """
    encoder = encoder.to(device).eval()
    block = math.ceil(depth * len(encoder.encoder.blocks))  # blocks count from 1
    features, labels = [], []
    for batch in batches:
        image_BCHW = normalise(batch.patch_view_BCHW.to(device), mean=mean, std=std)
        tokens_BND = (
            encoder(image_BCHW)
            if depth == 1
            else encoder.encoder.intermediates(encoder.stem(image_BCHW), [block])[0]
        )
        pooled_BD = tokens_BND[:, 1:].mean(dim=1) if pooling == "mean" else tokens_BND[:, 0]
        real_B = batch.index_B >= 0
        features.append(pooled_BD.float().cpu()[real_B])
        labels.append(batch.label_B[real_B])
    return Features(torch.cat(features), torch.cat(labels))


def pixel_features(batches: Iterable[Batch], *, size: int = 32) -> Features:
    """The image itself, averaged down to `size` x `size` pixels: what an encoder must beat."""
    pixels, labels = [], []
    for batch in batches:
        real_B = batch.index_B >= 0
        small = nn.functional.adaptive_avg_pool2d(to_unit(batch.patch_view_BCHW[real_B]), size)
        pixels.append(small.flatten(1))
        labels.append(batch.label_B[real_B])
    return Features(torch.cat(pixels), torch.cat(labels))


def recalibrate(
    encoder: ImageEncoder,
    batches: Iterable[Batch],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
) -> None:
    """Sets running statistics of BatchNorm layers to averages over `batches`.

    An untrained encoder's are 0 and 1: without this, it would be compared at a disadvantage.
    """
    norms = [m for m in encoder.modules() if isinstance(m, nn.BatchNorm2d)]
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
    encoder.to(device).train()
    with torch.no_grad():
        for number, batch in enumerate(batches, start=1):
            for norm in norms:
                norm.momentum = 1 / number  # a plain average over the batches
            encoder.stem(normalise(batch.patch_view_BCHW.to(device), mean=mean, std=std))
    encoder.eval()
