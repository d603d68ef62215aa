"""BEiT's block proposals, shared by the blockwise masks (unilm `masking_generator.py`)."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.masks import Mask
from mimkit.random import Purpose, Rng, generator

BoolArray = NDArray[np.bool_]
_BEIT_COUNT, _BEIT_MIN_BLOCK = 75, 16  # on BEiT's grid of 14x14
_ATTEMPTS = 10  # proposals a block, BEiT's


def check_count(num_masked: int, *, grid: Grid) -> None:
    """UserError unless at least one patch is masked and at least one is visible."""
    total = grid[0] * grid[1]
    if not 1 <= num_masked <= total - 1:
        raise UserError(
            f"mask.num_masked is {num_masked}, but a grid of {grid[0]}x{grid[1]} has {total} "
            f"patches; set mask.num_masked to 1..{total - 1}"
        )


@dataclass(frozen=True)
class Blocks:
    """How blocks are drawn: areas uniform in [min_block, room], aspect ratios log-uniform.

    Built by `make_blocks`, which checks the numbers.
    """

    min_block: int
    max_block: int
    log_aspect: float

    def add(self, mask_HW: BoolArray, rng: Rng, *, room: int) -> int:
        """Adds one block of at most `room` new patches; the number added, 0 if nothing fitted.

        As in BEiT a block is smaller than the grid in both directions, may overlap earlier ones,
        and its area is drawn between min_block and `room` even when `room` is the smaller. The
        upper bound of a position is inclusive: without that the last row and column stay visible.
        """
        height, width = mask_HW.shape
        room = min(room, self.max_block)
        for _ in range(_ATTEMPTS):
            draw_area, draw_aspect, draw_top, draw_left = rng.random(4).tolist()
            area = self.min_block + (room - self.min_block) * draw_area
            aspect = math.exp(self.log_aspect * (1 - 2 * draw_aspect))
            rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if not (0 < rows < height and 0 < columns < width):
                continue
            top, left = int(draw_top * (height - rows + 1)), int(draw_left * (width - columns + 1))
            block = mask_HW[top : top + rows, left : left + columns]
            added = rows * columns - int(np.count_nonzero(block))
            if 0 < added <= room:
                block[:] = True
                return added
        return 0

    def fill(self, mask_HW: BoolArray, rng: Rng, *, count: int) -> int:
        """Adds blocks until `count` patches are masked or none fits; how many are missing."""
        missing = count
        while missing > 0 and (added := self.add(mask_HW, rng, room=missing)):
            missing -= added
        return missing


def make_blocks(
    *, grid: Grid, num_masked: int, min_block: int | None, max_block: int | None, aspect: float
) -> Blocks:
    """Checked `Blocks`; min_block None is BEiT's share, 16 of 75, where the grid has room."""
    check_count(num_masked, grid=grid)
    if not 0 < aspect <= 1:
        raise UserError(f"mask.aspect is {aspect}; it is the smallest ratio of sides, in (0, 1]")
    upper = min(num_masked, num_masked if max_block is None else max_block, _largest(grid, aspect))
    if max_block is not None and max_block < 1:
        raise UserError(f"mask.max_block is {max_block}; a block has at least 1 patch")
    if min_block is None:
        share = round(num_masked * _BEIT_MIN_BLOCK / _BEIT_COUNT)
        min_block = max(1, min(_BEIT_MIN_BLOCK, share, upper))
    if not 1 <= min_block <= upper:
        raise UserError(
            f"mask.min_block is {min_block}, but with {num_masked} masked patches on a grid of "
            f"{grid[0]}x{grid[1]} a block has 1..{upper} patches; set mask.min_block in that range "
            "or leave it out"
        )
    return Blocks(min_block, num_masked if max_block is None else max_block, -math.log(aspect))


def _largest(grid: Grid, aspect: float) -> int:
    """Patches in the largest block that is smaller than the grid both ways; 1 if there is none."""
    short, long = sorted(side - 1 for side in grid)
    return max(1, short * min(long, int(short / aspect)))


class BlockMask(Mask):
    """A mask made of blocks: the settings that all of them take.

    Args:
        grid: rows, columns.
        num_masked: patches masked in every draw, 1 to N - 1.
        min_block: smallest area drawn for a block. None: min(16, 16/75 of num_masked), BEiT's 16
            at its 75 and the same share below it, and no more than the largest block of the grid.
        max_block: largest number of patches a block may add. None: num_masked.
        aspect: blocks have ratios of sides from `aspect` to 1 / `aspect`, log-uniform.
    """

    def __init__(
        self,
        *,
        grid: Grid,
        num_masked: int,
        min_block: int | None = None,
        max_block: int | None = None,
        aspect: float = 0.3,
    ) -> None:
        self.grid = grid
        self.num_masked = num_masked
        self.blocks = make_blocks(
            grid=grid,
            num_masked=num_masked,
            min_block=min_block,
            max_block=max_block,
            aspect=aspect,
        )
        # A trial: settings that give no mask are refused here, not hours later in a loader.
        self(generator(Purpose.MASK, seed=0))
