"""BEiT v1's blockwise mask as published: at most the number of patches asked for."""

import numpy as np

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.masks import MASKS, Mask
from mimkit.masks._blocks import BoolArray, make_blocks
from mimkit.random import Purpose, Rng, generator

_REDRAWS = 1000


@MASKS.register
class BlockwiseReference(Mask):
    """unilm `masking_generator.py`'s distribution, for comparison; use `blockwise` to train.

    At 14x14, 75 patches and blocks from 16: 74.47 patches on average, exactly 75 in 66.6 % of the
    draws, 64 at least (20,000 draws). Two differences: a draw without any block, which BEiT
    returns as an empty mask, is drawn again, and settings where no block ever fits are refused.
    """

    exact = False

    def __init__(
        self,
        *,
        grid: Grid,
        num_masked: int,
        min_block: int | None = None,
        max_block: int | None = None,
        aspect: float = 0.3,
    ) -> None:
        """Arguments as for `blockwise`; BEiT's own are min_block 16 at 75 of 14x14."""
        self.grid = grid
        self.num_masked = num_masked
        self.blocks = make_blocks(
            grid=grid,
            num_masked=num_masked,
            min_block=min_block,
            max_block=max_block,
            aspect=aspect,
        )
        self(generator(Purpose.MASK, seed=0))

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
