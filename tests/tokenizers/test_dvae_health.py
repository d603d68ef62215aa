"""Health measures against closed forms."""

import math

import pytest
import torch
from skimage.metrics import structural_similarity
from torch.nn.functional import pad

from mimkit.tokenizers._dvae_health import (
    collapse_warning,
    psnr,
    reconstruction_sums,
    ssim,
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
    assert collapse_warning(health, remedy="longer") is None


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
    warning = collapse_warning(token_health(torch.tensor(counts)), remedy="longer")
    assert warning is not None and words in warning and "Train it longer." in warning


def test_few_tokens_are_no_collapse() -> None:
    """Twelve tokens can use twelve words at most, of any vocabulary."""
    count_V = torch.zeros(8192, dtype=torch.int64)
    count_V[:12] = 1
    assert collapse_warning(token_health(count_V), remedy="longer") is None


def test_reconstruction_of_a_constant_shift() -> None:
    image_BChw = torch.full((2, 3, 16, 24), 0.5)
    sums = reconstruction_sums(image_BChw, image_BChw + 0.1)
    means = {name: float(total) / count for name, (total, count) in sums.items()}
    assert means["mae"] == pytest.approx(0.1, abs=1e-6)
    assert psnr(means["mse"]) == pytest.approx(20, abs=1e-4)
    # no structure: what is left is how alike the means are, with Wang et al.'s constant 0.01^2
    assert means["ssim"] == pytest.approx((2 * 0.5 * 0.6 + 1e-4) / (0.5**2 + 0.6**2 + 1e-4))
    assert psnr(0.0) == math.inf


def test_reconstruction_sums_add_up_over_batches(photos: torch.Tensor) -> None:
    """One image a batch, two of them, or none: the means are the same."""
    noise = torch.rand(photos.shape, generator=torch.Generator().manual_seed(0))
    again_BChw = (photos + 0.1 * noise).clamp(0, 1)
    whole = reconstruction_sums(photos, again_BChw)
    parts = [reconstruction_sums(photos[part], again_BChw[part])
             for part in (slice(0, 5), slice(5, 5), slice(5, None))]  # fmt: skip
    for name, (total, count) in whole.items():
        assert sum(part[name][1] for part in parts) == count
        assert float(sum(part[name][0] for part in parts)) == pytest.approx(float(total), rel=1e-5)


def test_ssim_of_each_image_is_that_of_scikit_image(photos: torch.Tensor) -> None:
    """Which leaves five pixels at the rim out, here those of a mirrored margin."""
    draw = torch.Generator().manual_seed(0)
    again_BChw = (photos + 0.2 * torch.randn(photos.shape, generator=draw)).clamp(0, 1)
    mirrored = [
        pad(images, (5, 5, 5, 5), mode="reflect").numpy() for images in (photos, again_BChw)
    ]
    expected = [
        structural_similarity(
            one, other, channel_axis=0, data_range=1.0, gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False,
        )
        for one, other in zip(*mirrored, strict=True)
    ]  # fmt: skip
    assert ssim(photos, again_BChw).tolist() == pytest.approx(expected, abs=1e-4)
    assert ssim(photos, photos).tolist() == pytest.approx([1.0] * len(photos))


def test_one_patch_is_enough_for_ssim() -> None:
    image_BChw = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert ssim(image_BChw, image_BChw).tolist() == pytest.approx([1.0, 1.0])
