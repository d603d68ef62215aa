"""Histograms of gradients: against a plain loop, against scikit-image, and as a picture."""

import math

import numpy as np
import pytest
import torch
from skimage.feature import hog as skimage_hog
from torch import Tensor

from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS

hog = TOKENIZERS["hog"]


def _cell(channel_hw: np.ndarray, top: int, left: int, *, cell: int = 8) -> list[float]:
    """MaskFeat's histogram of one cell, pixel by pixel, in float64."""
    last_y, last_x = (side - 1 for side in channel_hw.shape)

    def at(y: int, x: int) -> float:  # mirrored at the edges
        y, x = abs(y), abs(x)
        return float(channel_hw[last_y - abs(last_y - y), last_x - abs(last_x - x)])

    bins = [0.0] * 9
    for y in range(top, top + cell):
        for x in range(left, left + cell):
            across = sum(w * (at(y + d, x - 1) - at(y + d, x + 1))
                         for d, w in ((-1, 1), (0, 2), (1, 1)))  # fmt: skip
            down = sum(w * (at(y - 1, x + d) - at(y + 1, x + d))
                       for d, w in ((-1, 1), (0, 2), (1, 1)))  # fmt: skip
            degrees = math.degrees(math.atan2(across, down)) % 180
            bins[min(int(degrees // 20), 8)] += math.sqrt(across**2 + down**2)
    length = max(math.sqrt(sum(b**2 for b in bins)), 1e-12)
    return [b / length for b in bins]


def test_targets_equal_a_plain_loop(photos: Tensor) -> None:
    """The 108 numbers of a patch: channel, direction, row of cells, column of cells."""
    view_BChw = photos[:1, :, :32, :48]
    got_NV = hog().encode(view_BChw)[0].numpy()
    image = (view_BChw[0].double() * 255).round().numpy()
    for number, (row, column) in enumerate((r, c) for r in range(2) for c in range(3)):
        cells = np.array(
            [
                [[_cell(channel, row * 16 + y, column * 16 + x) for x in (0, 8)] for y in (0, 8)]
                for channel in image
            ]
        )  # c, y, x, o
        expected_V = cells.transpose(0, 3, 1, 2).reshape(-1)
        np.testing.assert_allclose(got_NV[number], expected_V, rtol=0, atol=1e-4)


def test_scikit_image_gives_the_same_where_both_gradients_are_the_same() -> None:
    """Of a sum of a row and a column Sobel's gradient is 4 times the plain difference.

    MaskFeat takes angles from the vertical, scikit-image from the horizontal: so the transpose.
    """
    rng = np.random.default_rng(0)
    image = (rng.random(32)[:, None] + rng.random(48)[None, :]) / 2
    theirs_yxo = skimage_hog(
        image, orientations=9, pixels_per_cell=(8, 8), cells_per_block=(1, 1), block_norm="L2",
        feature_vector=False,
    )[:, :, 0, 0]  # fmt: skip
    view_BChw = torch.from_numpy(image.T.copy()).float().expand(1, 3, -1, -1)
    ours_NV = hog(patch=8).encode(view_BChw)[0]
    ours_yxo = ours_NV[:, :9].reshape(6, 4, 9).transpose(0, 1).numpy()
    np.testing.assert_allclose(ours_yxo, theirs_yxo, rtol=0, atol=1e-3)


def test_histograms_have_length_one_or_are_zero(photos: Tensor) -> None:
    tokenizer = hog()
    target_BNV = tokenizer.encode(photos[:, :, :32, :32])
    assert tokenizer.prediction_dim == 108
    length = target_BNV.reshape(len(photos), 4, 3, 9, 4).norm(dim=3)
    torch.testing.assert_close(length, torch.ones_like(length))
    assert not tokenizer.encode(torch.full((1, 3, 16, 16), 0.3)).any()


def test_directions_are_unsigned_and_brightness_does_not_matter(photos: Tensor) -> None:
    view_BChw = photos[:2, :, :32, :32]
    target_BNV = hog().encode(view_BChw)
    other_BChw = ((view_BChw * 255).round() * -1 + 255) / 255
    torch.testing.assert_close(hog().encode(other_BChw), target_BNV, rtol=0, atol=1e-5)
    torch.testing.assert_close(hog().encode(view_BChw * 0.5), target_BNV, rtol=0, atol=1e-5)


def test_an_upright_edge_is_drawn_upright_in_its_channel() -> None:
    view_BChw = torch.zeros(1, 3, 8, 8)
    view_BChw[:, 1, :, 4:] = 1.0  # green
    tokenizer = hog(patch=8)
    drawn_Chw = tokenizer.decode(tokenizer.encode(view_BChw), (1, 1))[0]
    assert not drawn_Chw[0].any() and not drawn_Chw[2].any()
    assert torch.equal(drawn_Chw[1].sum(0), torch.tensor([0.0, 0, 0, 8, 8, 0, 0, 0]))


def test_the_loss_is_the_mean_squared_error() -> None:
    draw = torch.Generator().manual_seed(0)
    predicted_MV, target_MV = torch.randn(2, 5, 108, generator=draw).unbind()
    expected = (predicted_MV - target_MV).square().sum() / (5 * 108)
    torch.testing.assert_close(hog().loss(predicted_MV, target_MV), expected)


@pytest.mark.parametrize("settings", [{"patch": 12}, {"cell": 0}, {"bins": 0}, {"patch": 4}])
def test_cells_that_do_not_fit_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"whole cells in a patch; MaskFeat has 16, 8 and 9"):
        hog(**settings)
