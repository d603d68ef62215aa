"""Masked pixels never enter the stem: they are replaced before it."""

from typing import Literal

import torch
from torch import Tensor

from mimkit.batch import Grid
from mimkit.models.mask_at import MASK_AT, MaskAt


@MASK_AT.register
class BeforeStem(MaskAt):
    """Pixels of masked patches become the filler, and their tokens the mask token as well.

    Nothing under the mask can reach a visible token. A stem that overlaps sees the filler at the
    rim of the mask instead, which it does not see when the encoder is used; batch statistics are
    shifted by it.

    Args:
        filler: "zero", the mean colour of the data (0 after normalisation); or "mean", of the
            image's own visible pixels.
    """

    def __init__(self, *, filler: Literal["zero", "mean"] = "zero") -> None:
        self.filler = filler

    def pixels(self, image_BCHW: Tensor, mask_BN: Tensor, *, grid: Grid) -> Tensor:
        mask_B1HW = _on_pixels(mask_BN, grid=grid, image_BCHW=image_BCHW)
        if self.filler == "zero":
            return image_BCHW.masked_fill(mask_B1HW, 0)
        visible_B1HW = ~mask_B1HW
        count_B111 = visible_B1HW.sum((2, 3), keepdim=True).clamp_min(1)
        mean_BC11 = (image_BCHW * visible_B1HW).sum((2, 3), keepdim=True) / count_B111
        return torch.where(mask_B1HW, mean_BC11, image_BCHW)


def _on_pixels(mask_BN: Tensor, *, grid: Grid, image_BCHW: Tensor) -> Tensor:
    patch = image_BCHW.shape[2] // grid[0]
    mask_B1rc = mask_BN.view(-1, 1, *grid)
    return mask_B1rc.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
