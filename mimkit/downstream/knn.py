"""kNN on frozen features: the cheapest question one can put to an encoder."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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


Extractor = Callable[[Batch], Tensor]  # Batch -> feature_BD


def extract(extractors: Mapping[str, Extractor], batches: Iterable[Batch]) -> dict[str, Features]:
    """Each extractor's features of every real (not padded) image, in one pass over the images."""
    found: dict[str, list[Tensor]] = {name: [] for name in extractors}
    labels = []
    for batch in batches:
        real_B = batch.index_B >= 0
        labels.append(batch.label_B[real_B])
        for name, extractor in extractors.items():
            found[name].append(extractor(batch).float().cpu()[real_B])
    return {name: Features(torch.cat(parts), torch.cat(labels)) for name, parts in found.items()}


def encoder_features(
    encoder: ImageEncoder,
    *,
    pooling: str,
    depth: float,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
) -> Extractor:
    """Mean of an image's patch tokens, or its class token, from a frozen encoder.

    Args:
        depth: share of the blocks to go through; 1 also goes through the last norm.
    """
    encoder = encoder.to(device).eval()
    block = math.ceil(depth * len(encoder.encoder.blocks))  # blocks count from 1

    @torch.no_grad()
    def features(batch: Batch) -> Tensor:
        image_BCHW = normalise(batch.patch_view_BCHW.to(device), mean=mean, std=std)
        tokens_BND = (
            encoder(image_BCHW) if depth == 1 else encoder.intermediates(image_BCHW, [block])[0]
        )
        return tokens_BND[:, 1:].mean(dim=1) if pooling == "mean" else tokens_BND[:, 0]

    return features


def pixel_features(batch: Batch, *, size: int = 32) -> Tensor:
    """The image itself, averaged down to `size` x `size` pixels: what an encoder must beat."""
    view_BCHW = to_unit(batch.patch_view_BCHW)
    return nn.functional.adaptive_avg_pool2d(view_BCHW, size).flatten(1)
