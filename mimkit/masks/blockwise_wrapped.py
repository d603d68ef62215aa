"""Blockwise masks without BEiT's centre bias: rolled around the edges of the grid."""

import numpy as np

from mimkit.masks import MASKS
from mimkit.masks._blocks import BoolArray
from mimkit.masks.blockwise import Blockwise
from mimkit.random import Rng


@MASKS.register
class BlockwiseWrapped(Blockwise):
    """A `blockwise` draw, its rows and columns rolled by uniform shifts: blocks may wrap around.

    Every patch is masked with probability num_masked / N, exactly and on every grid, because all
    shifts are equally likely; `blockwise` at 14x14 and 75 masks the centre in 71 % of the draws and
    a corner in 4 %, this one both in 38 %. Sizes and shapes of the blocks are those of `blockwise`
    on the torus; in the picture, a block across an edge is seen as two. Settings: `BlockMask`.
    """

    def __call__(self, rng: Rng) -> BoolArray:
        mask_HW = super().__call__(rng).reshape(self.grid)
        down, right = (int(rng.integers(side)) for side in self.grid)
        return np.roll(mask_HW, (down, right), axis=(0, 1)).reshape(-1)
