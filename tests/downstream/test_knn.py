"""kNN against a plain loop and scikit-learn's, and the fairness of the untrained baseline."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from mimkit.batch import Batch
from mimkit.downstream.knn import (
    Features,
    extract,
    knn_accuracy,
    pixel_features,
)

PIXELS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "device": torch.device("cpu")}


def _clusters(num: int, seed: int) -> Features:
    draw = torch.Generator().manual_seed(seed)
    label_B = torch.randint(4, (num,), generator=draw)
    centre = torch.eye(4, 12)[label_B] * 2
    return Features(centre + torch.randn(num, 12, generator=draw), label_B)


def test_one_neighbour_equals_scikit_learn() -> None:
    train, heldout = _clusters(300, 0), _clusters(120, 1)
    centre_D = train.feature_BD.mean(dim=0)
    judge = KNeighborsClassifier(n_neighbors=1, metric="cosine")
    judge.fit((train.feature_BD - centre_D).numpy(), train.label_B.numpy())
    expected = judge.score((heldout.feature_BD - centre_D).numpy(), heldout.label_B.numpy())
    assert 0.5 < expected < 1
    assert knn_accuracy(train, heldout, neighbours=1) == pytest.approx(expected)


def test_votes_are_weighted_by_similarity() -> None:
    train, heldout = _clusters(300, 0), _clusters(120, 1)
    mean_D = train.feature_BD.mean(dim=0)
    correct = 0
    for feature_D, label in zip(heldout.feature_BD, heldout.label_B, strict=True):
        similarity = torch.cosine_similarity(train.feature_BD - mean_D, (feature_D - mean_D)[None])
        votes = np.zeros(4)
        for neighbour in similarity.argsort(descending=True)[:20]:
            votes[train.label_B[neighbour]] += np.exp(float(similarity[neighbour]) / 0.07)
        correct += int(votes.argmax() == label)
    assert knn_accuracy(train, heldout, neighbours=20) == pytest.approx(correct / 120)


def test_features_of_padding_do_not_count() -> None:
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    index_B = torch.tensor([5, 6, -1, -1])
    batch = Batch(images, images, torch.empty(4, 0, dtype=torch.bool), torch.arange(4), index_B)
    found = extract({"pixels": pixel_features}, [batch])["pixels"]
    assert found.label_B.tolist() == [0, 1]
    assert found.feature_BD.shape == (2, 3 * 32 * 32)
    assert found.feature_BD[0].mean() == pytest.approx(float(images[0].float().mean()) / 255)
