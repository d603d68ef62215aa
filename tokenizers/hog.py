"""Histograms of oriented gradients, MaskFeat's target: for each cell of a patch and each channel.

Source: Wei et al. 2022 (MaskFeat), SlowFast's operators.py, `HOGLayerC`.
"""

import hashlib
import math

import torch
from einops import rearrange
from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer


@TOKENIZERS.register
class HogTokenizer(VisualTokenizer):
    """MaskFeat's 108 numbers for 16 pixels: 3 channels, 9 directions, 2 x 2 cells of 8 pixels.

    Gradients are Sobel's, of each channel by itself, over edges of the view mirrored without its
    last row; each pixel adds the length of its gradient to the one direction it falls into
    (unsigned: 180 degrees); the histogram of a cell and channel is divided by its own length.

    Args:
        patch: pixels of the token view along a side of a patch, a multiple of `cell`.
        cell: pixels along a side of a cell.
        bins: directions.
    """

    vocabulary = None

    def __init__(self, *, patch: int = 16, cell: int = 8, bins: int = 9) -> None:
        super().__init__()
        if cell < 1 or bins < 1 or patch < cell or patch % cell:
            raise UserError(
                f"tokenizer.patch={patch}, tokenizer.cell={cell}, tokenizer.bins={bins}: expected "
                "at least 1 each, and whole cells in a patch; MaskFeat has 16, 8 and 9"
            )
        self.patch, self.cell, self.bins = patch, cell, bins
        self.prediction_dim = 3 * bins * (patch // cell) ** 2
        decides = f"hog {patch} {cell} {bins} sobel reflect length-per-cell"
        self.fingerprint = hashlib.sha256(decides.encode()).hexdigest()

    @torch.no_grad()
    def encode(self, view_BChw: Tensor) -> Tensor:
        """float32 in [0, 1] -> target_BNV, float32, ordered by channel, direction, cell."""
        self.grid(view_BChw.shape[-2], view_BChw.shape[-1])
        cells = self.patch // self.cell
        return rearrange(
            self._histograms(view_BChw), "b c o (y p) (x q) -> b (y x) (c o p q)", p=cells, q=cells
        )

    def _histograms(self, view_BChw: Tensor) -> Tensor:
        """One histogram (o) a channel and cell, each of length 1, or 0 where all is flat; BCoyx."""
        across_BChw, down_BChw = sobel(view_BChw)
        length_BC1hw = torch.hypot(across_BChw, down_BChw).unsqueeze(2)
        # MaskFeat's angle, from the vertical; a whole turn is 2 * bins, so opposite ones meet.
        angle_BC1hw = torch.atan2(across_BChw, down_BChw).unsqueeze(2) * (self.bins / math.pi)
        bin_BC1hw = angle_BC1hw.floor().long() % self.bins
        empty_BCohw = length_BC1hw.new_zeros(*view_BChw.shape[:2], self.bins, *view_BChw.shape[2:])
        vote_BCohw = empty_BCohw.scatter_(2, bin_BC1hw, length_BC1hw)
        sum_BCoyx = rearrange(
            vote_BCohw, "b c o (y p) (x q) -> b c o y x p q", p=self.cell, q=self.cell
        ).sum(dim=(-2, -1))
        return nn.functional.normalize(sum_BCoyx, dim=2)

    def loss(self, predicted_MV: Tensor, target_M: Tensor) -> Tensor:
        """Mean squared error over the numbers of all masked patches, in fp32."""
        return nn.functional.mse_loss(predicted_MV.float(), target_M)

    def decode(self, target_BN: Tensor, grid: Grid) -> Tensor:
        """Targets -> image_BChw in [0, 1]: in each cell a star of strokes along the edges.

        A stroke is as bright as its direction's share of the cell, in the colour of its channel.
        """
        cells = self.patch // self.cell
        histogram_BCoyx = rearrange(
            target_BN, "b (y x) (c o p q) -> b c o (y p) (x q)",
            y=grid[0], x=grid[1], c=3, o=self.bins, p=cells, q=cells,
        )  # fmt: skip
        stroke_opq = self._strokes().to(target_BN)
        image_BCypxq = torch.einsum("bcoyx,opq->bcypxq", histogram_BCoyx, stroke_opq)
        return rearrange(image_BCypxq, "b c y p x q -> b c (y p) (x q)").clamp(0, 1)

    def _strokes(self) -> Tensor:
        """A line through the middle of a cell, at right angles to the gradients of each bin; opq"""
        middle_o = (torch.arange(self.bins) + 0.5) * (math.pi / self.bins)
        place_p = torch.arange(self.cell) - (self.cell - 1) / 2
        across_oq = torch.sin(middle_o)[:, None] * place_p
        down_op = torch.cos(middle_o)[:, None] * place_p
        return ((down_op[:, :, None] + across_oq[:, None, :]).abs() < 0.51).float()


def sobel(view_BChw: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients across (left minus right) and down (upper minus lower), each of the view's size.

    Of pixels in 0..255: bytes become whole numbers again, whose sums are exact in whatever order.
    Else a gradient that is 0 in one direction would fall to either side of it, by rounding.
    """
    padded = nn.functional.pad(view_BChw * 255, (1, 1, 1, 1), mode="reflect")
    smooth_down = padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]
    smooth_across = padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
    return (
        smooth_down[..., :-2] - smooth_down[..., 2:],
        smooth_across[..., :-2, :] - smooth_across[..., 2:, :],
    )
