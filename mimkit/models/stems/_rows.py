"""Patches as rows: what a stem of non-overlapping convolutions computes, as matrix products.

Rows are places of any image, channels are their columns. Pixels that a convolution merges lie in
rows next to each other, so that every layer reads its input as it lies.
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


class PatchConv2d(nn.Conv2d):
    """A convolution whose kernel is its stride: (B, C, H, W) maps as torch, or rows as a matmul.

    Rows (R f f, C) of R squares of f x f places, row by row -> (R, C_out). The product is here and
    not in the stem because ZeRO-3 gathers weights for a module when the module is called.
    """

    def __init__(self, inputs: int, outputs: int, factor: int) -> None:
        super().__init__(inputs, outputs, factor, factor)
        self.factor = factor

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim == 4:
            return super().forward(input)
        weight_OI = self.weight.permute(0, 2, 3, 1).flatten(1)
        return functional.linear(input.reshape(-1, weight_OI.shape[1]), weight_OI, self.bias)


def pixel_rows(image_BCHW: Tensor, factors: Sequence[int]) -> Tensor:
    """Pixels (B, N, P P, C) of each patch in the order in which convolutions merge them.

    Args:
        factors: kernel sizes of the convolutions, first to last; their product is P.
    """
    batch, channels, height, width = image_BCHW.shape
    patch, split = math.prod(factors), [*reversed(factors)]
    depth = len(split)
    image = image_BCHW.reshape(batch, channels, height // patch, *split, width // patch, *split)
    vertical, horizontal = range(2, 3 + depth), range(3 + depth, 4 + 2 * depth)
    squares = [axis for pair in zip(vertical, horizontal, strict=True) for axis in pair]
    return image.permute(0, *squares, 1).reshape(batch, -1, patch * patch, channels)
