"""Pixels as targets: MAE's formula written out, and what is drawn of them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer

pixels = TOKENIZERS["pixels"]


def _by_hand(view_BChw: Tensor, *, patch: int, normalise: bool) -> np.ndarray:
    """MAE's patchify and norm_pix_loss, one number after the other, in float64."""
    image = view_BChw.double().numpy()
    batch, _, height, width = image.shape
    target = []
    for b in range(batch):
        for top in range(0, height, patch):
            for left in range(0, width, patch):
                numbers = [
                    image[b, c, top + y, left + x]
                    for y in range(patch)
                    for x in range(patch)
                    for c in range(3)
                ]
                if normalise:
                    mean = sum(numbers) / len(numbers)
                    variance = sum((n - mean) ** 2 for n in numbers) / (len(numbers) - 1)
                    numbers = [(n - mean) / (variance + 1e-6) ** 0.5 for n in numbers]
                target.append(numbers)
    return np.array(target).reshape(batch, -1, 3 * patch**2)


@pytest.mark.parametrize("normalise", ["patch", "none"])
def test_targets_equal_maes_formula(photos: Tensor, normalise: str) -> None:
    view_BChw = photos[:2, :, :32, :48]
    got = pixels(patch=16, normalise=normalise).encode(view_BChw)
    expected = _by_hand(view_BChw, patch=16, normalise=normalise == "patch")
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=2e-5)


def test_a_flat_patch_is_all_zero_and_not_infinite() -> None:
    assert torch.equal(pixels(patch=8).encode(torch.ones(1, 3, 8, 8)), torch.zeros(1, 1, 192))


@pytest.mark.parametrize(("loss", "power"), [("mse", 2), ("l1", 1)])
def test_the_loss_is_the_mean_over_all_numbers(loss: str, power: int) -> None:
    draw = torch.Generator().manual_seed(0)
    predicted_MV, target_MV = torch.randn(2, 5, 48, generator=draw).unbind()
    expected = (predicted_MV - target_MV).abs().pow(power).sum() / (5 * 48)
    tokenizer = pixels(patch=4, loss=loss)
    torch.testing.assert_close(tokenizer.loss(predicted_MV, target_MV), expected)
    half = tokenizer.loss(predicted_MV.bfloat16(), target_MV)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, expected, rtol=0.02, atol=0)


def test_plain_pixels_are_drawn_as_they_are(photos: Tensor) -> None:
    tokenizer = pixels(patch=8, normalise="none")
    view_BChw = photos[:, :, :32, :48]
    assert torch.equal(tokenizer.decode(tokenizer.encode(view_BChw), (4, 6)), view_BChw)


def test_a_normalised_patch_is_drawn_around_grey_in_its_own_contrast(photos: Tensor) -> None:
    """The picture and the view of a patch differ by a shift and a scale, so they correlate."""
    tokenizer = pixels(patch=8)
    view_BChw = photos[:1, :, :8, :8] * 0.1 + 0.9  # bright and faint
    drawn = tokenizer.decode(tokenizer.encode(view_BChw), (1, 1))
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(drawn.std()) == pytest.approx(1 / 6, abs=0.01)
    both = torch.stack([drawn.flatten(), view_BChw.flatten()])
    assert float(torch.corrcoef(both)[0, 1]) > 0.99


def test_the_fingerprint_is_of_the_targets_only() -> None:
    def of(**settings: object) -> str:
        tokenizer: VisualTokenizer = pixels(**settings)
        return tokenizer.fingerprint

    assert of() == of(loss="l1")
    assert len({of(), of(patch=8), of(normalise="none")}) == 3


def test_a_size_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(UserError, match=r"16 x 16 pixels.*24 x 32 .*data\.token_size to 16 times"):
        pixels().grid(24, 32)
    with pytest.raises(UserError, match=r"tokenizer\.patch is 0; expected at least 1"):
        pixels(patch=0)
