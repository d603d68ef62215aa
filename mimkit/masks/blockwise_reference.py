"""BEiT v1's blockwise mask as published: at most the number of patches asked for."""

import numpy as np

from mimkit.errors import UserError
from mimkit.masks import MASKS
from mimkit.masks._blocks import BlockMask, BoolArray
from mimkit.random import Rng

_REDRAWS = 1000


@MASKS.register
class BlockwiseReference(BlockMask):
    """unilm `masking_generator.py`'s distribution, for comparison; use `blockwise` to train.

    At 14x14, 75 patches and blocks from 16: 74.47 patches on average, exactly 75 in 66.6 % of the
    draws, 64 at least; the centre is masked in 71 % of the draws, a corner in 4 % (20,000 draws).
    Two differences: a draw without any block, which BEiT returns as an empty mask, is drawn again,
    and settings where no block ever fits are refused.
    Settings: `BlockMask`; BEiT's own are min_block 16 at 75 of 14x14.
    """

    exact = False

    def __call__(self, rng: Rng) -> BoolArray:
        for _ in range(_REDRAWS):
            mask_HW = np.zeros(self.grid, np.bool_)
            if self.blocks.fill(mask_HW, rng, count=self.num_masked) < self.num_masked:
                return mask_HW.reshape(-1)
        raise UserError(
            f"no block of {self.blocks.min_block} to {self.num_masked} patches fits a grid of "
            f"{self.grid[0]}x{self.grid[1]} in {_REDRAWS} draws; change mask.min_block, "
            "mask.aspect or mask.num_masked, or set mask.name to blockwise"
        )
