"""kNN against a plain loop and scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from mimkit.downstream.probes.knn import knn_votes, vote_logits


def _clusters(num: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    label_B = torch.randint(4, (num,), generator=draw)
    centre = torch.eye(4, 12)[label_B] * 2
    return centre + torch.randn(num, 12, generator=draw), label_B


def _accuracy(vote_BV: Tensor, label_B: Tensor) -> float:
    return float((vote_BV.argmax(1) == label_B).double().mean())


def test_one_neighbour_equals_scikit_learn() -> None:
    (train_BF, label_B), (judged_BF, truth_B) = _clusters(300, 0), _clusters(120, 1)
    centre_F = train_BF.mean(dim=0)
    judge = KNeighborsClassifier(n_neighbors=1, metric="cosine")
    judge.fit((train_BF - centre_F).numpy(), label_B.numpy())
    expected = judge.score((judged_BF - centre_F).numpy(), truth_B.numpy())
    assert 0.5 < expected < 1
    votes = knn_votes(train_BF, label_B, judged_BF, neighbours=[1], num_classes=4)
    assert _accuracy(votes[1], truth_B) == pytest.approx(expected)


def test_votes_are_weighted_by_similarity() -> None:
    (train_BF, label_B), (judged_BF, _) = _clusters(300, 0), _clusters(30, 1)
    found = knn_votes(train_BF, label_B, judged_BF, neighbours=[3, 20, 1000], num_classes=5)
    mean_F = train_BF.mean(dim=0)
    for number, vote_BV in found.items():
        for feature_F, vote_V in zip(judged_BF, vote_BV, strict=True):
            similarity = torch.cosine_similarity(train_BF - mean_F, (feature_F - mean_F)[None])
            expected = np.zeros(5)
            for neighbour in similarity.argsort(descending=True)[:number]:
                expected[label_B[neighbour]] += np.exp(float(similarity[neighbour]) / 0.07)
            assert vote_V.numpy() == pytest.approx(expected, rel=1e-4)


def test_votes_become_probabilities() -> None:
    vote_BV = torch.tensor([[3.0, 1.0, 0.0]])
    torch.testing.assert_close(
        vote_logits(vote_BV).softmax(1), torch.tensor([[0.75, 0.25, 0.0]]), atol=2e-6, rtol=0
    )
