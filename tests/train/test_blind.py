"""Blind predictors in closed form, and on sources whose entropies are known."""

import math

import pytest
import torch
from torch import Tensor

from mimkit.train.blind import FOLDS, TokenCounts, blind_scores, position_loss


def _counts(word_BN: Tensor, *, vocabulary: int, index_B: Tensor | None = None) -> Tensor:
    """What an evaluation would count if every patch were masked."""
    images, positions = word_BN.shape
    counts = TokenCounts(positions=positions, vocabulary=vocabulary, device=torch.device("cpu"))
    index_B = torch.arange(images) if index_B is None else index_B
    counts.add(
        word_BN.flatten(),
        torch.arange(positions).repeat(images),
        index_B.repeat_interleave(positions),
    )
    return counts.count_FNV


def _drawn(share_NV: Tensor, *, images: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.multinomial(share_NV, images, replacement=True, generator=draw).T


def _entropy(share_NV: Tensor) -> float:
    return float(torch.special.entr(share_NV).sum(1).mean())


def test_counts_stand_by_fold_position_and_word() -> None:
    count_FNV = _counts(torch.tensor([[1, 0], [1, 2]]), vocabulary=3,
                        index_B=torch.tensor([FOLDS + 1, 1]))  # fmt: skip
    assert count_FNV.shape == (FOLDS, 2, 3)
    assert count_FNV[1].tolist() == [[0, 2, 0], [1, 0, 1]]
    assert count_FNV.sum() == 4


def test_uniform_and_constant_tokens() -> None:
    uniform = blind_scores(_counts(torch.arange(8).repeat(5, 1), vocabulary=8))
    assert uniform["unigram_entropy"] == pytest.approx(math.log(8))
    assert uniform["most_common_token"] == pytest.approx(1 / 8)
    constant = blind_scores(_counts(torch.ones(5, 3, dtype=torch.int64), vocabulary=4))
    assert constant["unigram_entropy"] == 0
    assert constant["ln_vocab"] == pytest.approx(math.log(4))
    assert (constant["most_common_token"], constant["tokens_used"]) == (1.0, 1)


def test_a_source_that_depends_on_the_position_costs_its_conditional_entropy() -> None:
    draw = torch.Generator().manual_seed(1)
    share_NV = torch.rand(16, 32, generator=draw).pow(6)
    share_NV /= share_NV.sum(1, keepdim=True)
    scores = blind_scores(_counts(_drawn(share_NV, images=4000), vocabulary=32))
    assert scores["position_loss"] == pytest.approx(_entropy(share_NV), abs=0.02)
    assert scores["unigram_entropy"] > scores["position_loss"] + 0.5


def test_a_source_that_does_not_depend_on_it_costs_the_unigram_entropy() -> None:
    """Counts of one position are drawn towards those of all, so that noise costs nothing."""
    draw = torch.Generator().manual_seed(2)
    share_V = torch.rand(32, generator=draw).pow(4)
    share_NV = (share_V / share_V.sum()).repeat(64, 1)
    for images, tolerance in ((24, 0.05), (1000, 0.01)):
        scores = blind_scores(_counts(_drawn(share_NV, images=images), vocabulary=32))
        assert scores["position_loss"] == pytest.approx(_entropy(share_NV), abs=tolerance)


def test_the_position_may_tell_everything() -> None:
    words = torch.arange(16).repeat(400, 1)
    assert position_loss(_counts(words, vocabulary=512)) < 0.02


def test_it_is_a_held_out_number() -> None:
    """Tokens that never come again in another fold are not predicted, however often in their own.

    Without any other image the guess is 1 / V; where all words differ it is 1 / 2 V by Witten and
    Bell's rule (half of what comes next is new), while the unigram entropy flatters itself.
    """
    alone = _counts(torch.zeros(9, 5, dtype=torch.int64), vocabulary=64,
                    index_B=torch.full((9,), 2 * FOLDS))  # fmt: skip
    assert position_loss(alone) == pytest.approx(math.log(64))
    different = blind_scores(_counts(torch.arange(40).view(8, 5), vocabulary=64))
    assert different["unigram_entropy"] == pytest.approx(math.log(40))
    assert different["position_loss"] == pytest.approx(math.log(2 * 64), abs=1e-6)
