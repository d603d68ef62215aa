"""The certificate of a mask: what it promises, measured on many draws.

Shape letters: K draws, H rows, W columns, P permutations, D differences between mirrored patches.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.masks import Mask
from mimkit.random import Purpose, Rng, generator

BoolArray = NDArray[np.bool_]
MakeMask = Callable[[int], Mask]  # count -> the mask; UserError where it cannot have that count
_ROUNDS, _PER_ROUND = 7, 200  # of the timing
_BLOCK = 4096  # draws that are multiplied with signs at once: 16 MB at 999 permutations


@dataclass(frozen=True)
class MaskCertificate:
    """What was measured. Probabilities and shares are in 0..1, sizes in patches.

    Attributes:
        mask: what it was certified as: its name, and its settings where they are not the defaults.
        grid: rows, columns.
        count: patches asked for.
        draws, seed: how many masks were drawn, and their key: those of samples 0, 1, ... in the
            first epoch of a training with this seed.
        exact: share of the draws with exactly `count` patches.
        mean_count, least_count: patches in a draw, on average and in the smallest one.
        min_cell, max_cell: smallest and largest probability of a patch to be masked.
        corner, edge, centre: mean probability of the four corners, of all patches at the rim, and
            of the one, two or four patches in the middle.
        block_size: mean size of a connected region of masked patches (sharing sides; not around
            the edges of the grid).
        blocks: connected regions in a draw, on average.
        symmetric: p-value of `flip_symmetry`; a mask without a side it prefers gives any value in
            0..1 alike, one that never reaches the last row gives less than 0.01.
        us_per_mask: microseconds of one core to draw a mask, median of rounds.
        least_feasible, most_feasible: the counts that this grid takes, with the same settings.
        marginal: probability of each patch to be masked, H rows of W.
    """

    mask: str
    grid: Grid
    count: int
    draws: int
    seed: int
    exact: float
    mean_count: float
    least_count: int
    min_cell: float
    max_cell: float
    corner: float
    edge: float
    centre: float
    block_size: float
    blocks: float
    symmetric: float
    us_per_mask: float
    least_feasible: int
    most_feasible: int
    marginal: tuple[tuple[float, ...], ...]


def certify(
    make_mask: MakeMask,
    *,
    name: str,
    grid: Grid,
    count: int,
    draws: int = 20_000,
    seed: int = 0,
    progress: Callable[[range], Iterable[int]] = iter,
) -> MaskCertificate:
    """Draws `draws` masks of `count` patches and measures them.

    Args:
        make_mask: count -> the mask on `grid`, with its settings.
        progress: wraps the numbers of the draws, as tqdm does.

    Raises:
        UserError: the mask cannot have that count on this grid.
    """
    mask = make_mask(count)
    mask_KHW = draw_masks(mask, progress(range(draws)), grid=grid, seed=seed)
    count_K, marginal_HW = mask_KHW.sum((1, 2)), mask_KHW.mean(0)
    num_blocks = _num_blocks(mask_KHW)
    least, most = _feasible_counts(make_mask, grid=grid, count=count)
    return MaskCertificate(
        mask=name,
        grid=grid,
        count=count,
        draws=draws,
        seed=seed,
        exact=float((count_K == count).mean()),
        mean_count=float(count_K.mean()),
        least_count=int(count_K.min()),
        min_cell=float(marginal_HW.min()),
        max_cell=float(marginal_HW.max()),
        corner=float(marginal_HW[np.ix_([0, -1], [0, -1])].mean()),
        edge=float(marginal_HW[_rim(grid)].mean()),
        centre=float(marginal_HW[_middle(grid[0]), _middle(grid[1])].mean()),
        block_size=float(count_K.sum() / max(1, num_blocks)),
        blocks=num_blocks / draws,
        # the stream after the last draw's: no draw has seen its numbers
        symmetric=flip_symmetry(mask_KHW, generator(Purpose.MASK, seed=seed, sample=draws)),
        us_per_mask=1e6 * _seconds_per_mask(mask, seed=seed),
        least_feasible=least,
        most_feasible=most,
        marginal=tuple(tuple(row) for row in marginal_HW.tolist()),
    )


def draw_masks(mask: Mask, samples: Iterable[int], *, grid: Grid, seed: int) -> BoolArray:
    """mask_KHW of these samples, as training draws them in its epoch 0."""
    draws = [mask(generator(Purpose.MASK, seed=seed, sample=sample)) for sample in samples]
    return np.stack(draws).reshape(-1, *grid)


def _rim(grid: Grid) -> BoolArray:
    rim_HW = np.ones(grid, np.bool_)
    rim_HW[1:-1, 1:-1] = False
    return rim_HW


def _middle(side: int) -> slice:
    """The one or two places in the middle."""
    return slice((side - 1) // 2, side // 2 + 1)


def _num_blocks(mask_KHW: BoolArray) -> int:
    """Regions of masked patches that share sides, in all draws together."""
    from scipy import ndimage  # here, because importing it adds a warning filter

    neighbours = np.zeros((3, 3, 3), np.bool_)
    neighbours[1] = ndimage.generate_binary_structure(2, 1)  # never from one draw to the next
    return int(ndimage.label(mask_KHW, neighbours)[1])


def flip_symmetry(mask_KHW: BoolArray, rng: Rng, *, permutations: int = 999) -> float:
    """p-value of: mirrored masks, left to right or up and down, are as likely as the masks.

    A sign-flip permutation test, valid for any dependence between the patches of one mask: under
    symmetry, mirroring each mask with probability 1/2 changes nothing in distribution. That gives
    D_k = m_k - mirrored m_k a random sign s_k, so ||sum_k s_k D_k||^2 of the masks as drawn (all
    signs +1) is one of `permutations` + 1 exchangeable values, and p its rank from above. The two
    directions are put together by Bonferroni: min(1, 2 x the smaller p).
    """
    up_down, left_right = (_mirror_difference(mask_KHW, axis=axis) for axis in (1, 2))
    smaller = min(
        _sign_flip_p(difference_KD, rng, permutations=permutations)
        for difference_KD in (up_down, left_right)
    )
    return min(1.0, 2 * smaller)


def _mirror_difference(mask_KHW: BoolArray, *, axis: int) -> NDArray[np.int8]:
    """m - mirrored m of every draw in one half of the grid; the other half is its negative."""
    signed_KHW = mask_KHW.astype(np.int8)
    half = range(mask_KHW.shape[axis] // 2)
    return (signed_KHW - np.flip(signed_KHW, axis)).take(half, axis).reshape(len(mask_KHW), -1)


def _sign_flip_p(difference_KD: NDArray[np.int8], rng: Rng, *, permutations: int) -> float:
    drawn_PD = np.zeros((permutations, difference_KD.shape[1]))
    for first in range(0, len(difference_KD), _BLOCK):
        block_KD = difference_KD[first : first + _BLOCK].astype(np.float32)
        sign_PK = 2 * rng.integers(0, 2, (permutations, len(block_KD)), np.int8) - 1
        drawn_PD += sign_PK.astype(np.float32) @ block_KD  # whole numbers below 2^24: exact
    observed = (difference_KD.sum(0, dtype=np.float64) ** 2).sum()
    at_least = int(((drawn_PD**2).sum(1) >= observed).sum())
    return (1 + at_least) / (1 + permutations)


def _seconds_per_mask(mask: Mask, *, seed: int) -> float:
    rng, rounds = generator(Purpose.MASK, seed=seed), []
    for _ in range(_ROUNDS):
        start = time.process_time()
        for _ in range(_PER_ROUND):
            mask(rng)
        rounds.append((time.process_time() - start) / _PER_ROUND)
    return statistics.median(rounds)


def _feasible_counts(make_mask: MakeMask, *, grid: Grid, count: int) -> tuple[int, int]:
    """The smallest and the largest count that is accepted; `count` is known to be."""
    total = grid[0] * grid[1]
    least = next(c for c in range(count + 1) if _accepts(make_mask, c))
    most = next(c for c in range(total, count - 1, -1) if _accepts(make_mask, c))
    return least, most


def _accepts(make_mask: MakeMask, count: int) -> bool:
    try:
        make_mask(count)
    except UserError:
        return False
    return True
