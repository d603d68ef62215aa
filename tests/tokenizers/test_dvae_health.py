"""Health measures against closed forms."""

import math

import pytest
import torch

from mimkit.tokenizers._dvae_health import (
    collapse_warning,
    reconstruction_error,
    reconstruction_picture,
    token_counts,
    token_health,
)


def test_equal_use_has_the_perplexity_of_the_words_used() -> None:
    count_V = torch.zeros(512, dtype=torch.int64)
    count_V[:128] = 10
    health = token_health(count_V)
    assert (health.num_tokens, health.vocabulary, health.codes_used) == (1280, 512, 128)
    assert health.perplexity == pytest.approx(128)
    assert health.entropy == pytest.approx(math.log(128))
    assert health.top_share == pytest.approx(1 / 128)
    assert collapse_warning(health) is None


def test_counts_add_up_over_batches() -> None:
    first_BN, second_BN = torch.tensor([[0, 1, 1]]), torch.tensor([[3, 1, 0]])
    total_V = token_counts(first_BN, vocabulary=5) + token_counts(second_BN, vocabulary=5)
    assert total_V.tolist() == [2, 3, 0, 1, 0]


def test_one_word_has_no_entropy() -> None:
    health = token_health(torch.tensor([0, 9, 0]))
    assert (health.entropy, health.perplexity, health.top_share) == (0.0, 1.0, 1.0)


def test_nothing_counted_is_an_error() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        token_health(torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([1000] * 20 + [0] * 492, "only 20 of 512"),
        ([100_000] * 4 + [1] * 508, "perplexity is 4"),
        ([10_000] + [10] * 511, "one word takes 66%"),
    ],
)
def test_collapse_is_named(counts: list[int], words: str) -> None:
    warning = collapse_warning(token_health(torch.tensor(counts)))
    assert warning is not None and words in warning and "kl_weight" in warning


def test_few_tokens_are_no_collapse() -> None:
    """Twelve tokens can use twelve words at most, of any vocabulary."""
    count_V = torch.zeros(8192, dtype=torch.int64)
    count_V[:12] = 1
    assert collapse_warning(token_health(count_V)) is None


def test_reconstruction_error_of_a_constant_shift() -> None:
    image_BChw = torch.full((2, 3, 8, 8), 0.5)
    mae, psnr = reconstruction_error(image_BChw, image_BChw + 0.1)
    assert mae == pytest.approx(0.1, abs=1e-6)
    assert psnr == pytest.approx(20, abs=1e-4)
    assert reconstruction_error(image_BChw, image_BChw) == (0.0, math.inf)


def test_picture_has_originals_above_and_reconstructions_below() -> None:
    white_BChw, black_BChw = torch.ones(3, 3, 16, 24), torch.zeros(3, 3, 16, 24)
    picture = reconstruction_picture(black_BChw, white_BChw * 0.5, scale=2)
    assert picture.width >= 3 * 48 and picture.height >= 2 * 32
    assert picture.getpixel((20, 30)) == (0, 0, 0)
    assert picture.getpixel((20, 30 + picture.height // 2)) == (128, 128, 128)
