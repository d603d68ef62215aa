"""Patches masked uniformly at random, as in MAE."""

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import Grid
from mimkit.masks import MASKS, Mask
from mimkit.masks._blocks import check_count
from mimkit.random import Rng


@MASKS.register
class Random(Mask):
    """Every set of `num_masked` patches is equally likely."""

    def __init__(self, *, grid: Grid, num_masked: int) -> None:
        check_count(num_masked, grid=grid)
        self.grid = grid
        self.num_masked = num_masked

    def __call__(self, rng: Rng) -> NDArray[np.bool_]:
        mask_N = np.zeros(self.grid[0] * self.grid[1], np.bool_)
        mask_N[rng.permutation(len(mask_N))[: self.num_masked]] = True
        return mask_N
