"""The leak audit: change only pixels under the mask, and see which visible tokens move."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.masks import Mask
from mimkit.models.calibration import batch_norms, calibrate
from mimkit.models.mask_at import MaskAt
from mimkit.models.norms import Statistics
from mimkit.models.stems import Stem
from mimkit.random import Purpose, generator

_MOVED = 1e-6  # relative norm above which a token has moved; float32 rounding is below
_DIRECTIONS = 4  # of the token, that its derivative is taken along
_STATISTICS: tuple[Statistics, ...] = ("all", "visible", "frozen")


@dataclass(frozen=True)
class Leak:
    """What the pixels under a mask do to visible tokens; relative norms are |after - before| /
    |before|, over the tokens that the encoder gets as they are."""

    stem: str
    mask_at: str
    mode: str  # "train" or "eval"
    bn: str | None  # batch statistics: of the batch by "all" or "visible", or "running", "frozen"
    hidden: float  # share of the patches that hold the mask token
    visible_moved: float  # share of the visible tokens that move
    mean_relative: float  # over all visible tokens
    max_relative: float
    farthest: int  # patches from a moved token to the nearest masked one, 0 where none moves
    reach_declared: int  # pixels
    reach_measured: int


def leaks(
    stem: Stem,
    mask_at: MaskAt,
    *,
    name: str,
    placement: str,
    image_BCHW: Tensor,
    other_BCHW: Tensor,
    mask_BN: Tensor,
    every_statistics: bool = True,
) -> Iterator[Leak]:
    """One `Leak` in eval mode, then one in train mode for each setting of the batch statistics.

    Args:
        stem: left as it is; a copy whose running statistics are those of the images is measured.
        image_BCHW: normalised images.
        other_BCHW: as many others; their pixels come under the mask. (Exchanged within the batch,
            pixels would leave the batch statistics as they are.)
        every_statistics: False measures the stem's own setting only.
    """
    stem = copy.deepcopy(stem).float().cpu()
    calibrate(stem, [image_BCHW])
    reach = measured_reach(stem)
    for mode, statistics in _modes(stem, every_statistics=every_statistics):
        for norm in batch_norms(stem):
            norm.statistics = statistics or norm.statistics
        stem.train(mode == "train")
        hidden_BN, relative_R, distance_R = _moves(stem, mask_at, image_BCHW, other_BCHW, mask_BN)
        moved_R = relative_R > _MOVED
        some = len(relative_R) > 0
        yield Leak(
            stem=name,
            mask_at=placement,
            mode=mode,
            bn=_called(stem, mode),
            hidden=float(hidden_BN.float().mean()),
            visible_moved=float(moved_R.float().mean()) if some else 0.0,
            mean_relative=float(relative_R.mean()) if some else 0.0,
            max_relative=float(relative_R.max()) if some else 0.0,
            farthest=int(distance_R[moved_R].max()) if moved_R.any() else 0,
            reach_declared=stem.reach,
            reach_measured=reach,
        )


def _modes(stem: Stem, *, every_statistics: bool) -> list[tuple[str, Statistics | None]]:
    norms = batch_norms(stem)
    if not norms:
        return [("eval", None), ("train", None)]
    settings = _STATISTICS if every_statistics else (norms[0].statistics,)
    return [("eval", None), *(("train", statistics) for statistics in settings)]


def _called(stem: Stem, mode: str) -> str | None:
    norms = batch_norms(stem)
    if not norms:
        return None
    return norms[0].statistics if mode == "train" else "running"


@torch.no_grad()
def _moves(
    stem: Stem, mask_at: MaskAt, image_BCHW: Tensor, other_BCHW: Tensor, mask_BN: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_BN; and for each of R visible tokens how far it moves and how far the mask is."""
    grid = stem.grid(*image_BCHW.shape[2:])
    mask_B1HW = mask_BN.view(-1, 1, *grid)
    for axis in (2, 3):
        mask_B1HW = mask_B1HW.repeat_interleave(stem.patch_size, axis)
    changed_BCHW = torch.where(mask_B1HW, other_BCHW, image_BCHW)
    nothing_11D = torch.zeros(1, 1, stem.width)
    before, after = (
        mask_at.tokens(stem, image, mask_BN, nothing_11D).double()
        for image in (image_BCHW, changed_BCHW)
    )
    hidden_BN = mask_at.hidden(mask_BN, stem=stem, grid=grid)
    visible_BN = ~hidden_BN
    before_RD, after_RD = before[visible_BN], after[visible_BN]
    relative_R = (after_RD - before_RD).norm(dim=1) / before_RD.norm(dim=1).clamp_min(1e-30)
    return hidden_BN, relative_R, _distance(mask_BN, grid)[visible_BN]


def _distance(mask_BN: Tensor, grid: Grid) -> Tensor:
    """Patches to the nearest masked patch of the image, diagonals counting as one."""
    place_N2 = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1]))
    apart_NN = (place_N2[:, None] - place_N2[None]).abs().amax(-1)
    far = max(grid)
    return torch.where(mask_BN[:, None], apart_NN[None], far).amin(-1)


def sensitivity(stem: Stem, *, around: int = 2) -> NDArray[np.float32]:
    """How much each pixel moves the middle token: an image of 2 `around` + 1 patches a side.

    The root of the summed squares of d token / d pixel along some random directions of the token,
    in eval mode, on noise.
    """
    stem = copy.deepcopy(stem).float().cpu().eval().requires_grad_(False)
    side = (2 * around + 1) * stem.patch_size
    draw = torch.Generator().manual_seed(0)
    image_BCHW = torch.randn(1, 3, side, side, generator=draw, requires_grad=True)
    token_D = stem(image_BCHW)[0, (2 * around + 1) ** 2 // 2]
    squares_HW = torch.zeros(side, side)
    for _ in range(_DIRECTIONS):
        direction_D = torch.randn(stem.width, generator=draw)
        (gradient,) = torch.autograd.grad(token_D @ direction_D, image_BCHW, retain_graph=True)
        squares_HW += gradient[0].square().sum(0)
    found: NDArray[np.float32] = squares_HW.sqrt().numpy()
    return found


def measured_reach(stem: Stem, *, around: int = 2) -> int:
    """Pixels beyond its own patch that the middle token depends on, by its derivative."""
    seen = np.argwhere(sensitivity(stem, around=around) > 0)
    first, last = around * stem.patch_size, (around + 1) * stem.patch_size - 1
    return max(0, first - int(seen.min()), int(seen.max()) - last)


def noise(num: int, *, side: int) -> Tensor:
    """Normal pixels (num, 3, side, side), the same at every call."""
    return torch.randn(num, 3, side, side, generator=torch.Generator().manual_seed(0))


def block_mask(grid: Grid, *, batch: int) -> Tensor:
    """One block in the middle, 6 x 6 of 14 x 14 patches and the same share elsewhere."""
    mask_Brc = torch.zeros(batch, *grid, dtype=torch.bool)
    rows, columns = (max(1, round(side * 6 / 14)) for side in grid)
    top, left = (grid[0] - rows) // 2, (grid[1] - columns) // 2
    mask_Brc[:, top : top + rows, left : left + columns] = True
    return mask_Brc.flatten(1)


def leaks_of_run(
    stem: Stem, mask_at: MaskAt, mask: Mask, *, name: str, placement: str
) -> list[Leak]:
    """The short form, for one run: its own masks and batch statistics, on four images of noise.

    Raises:
        UserError: the stem sees farther than it says.
    """
    rng = generator(Purpose.MASK, seed=0)
    mask_BN = torch.from_numpy(np.stack([mask(rng) for _ in range(4)]))
    side = stem.patch_size
    height, width = (length * side for length in mask.grid)
    image_BCHW, other_BCHW = noise(8, side=max(height, width))[..., :height, :width].chunk(2)
    found = list(leaks(stem, mask_at, name=name, placement=placement, image_BCHW=image_BCHW,
                       other_BCHW=other_BCHW, mask_BN=mask_BN, every_statistics=False))  # fmt: skip
    if found[0].reach_measured > found[0].reach_declared:
        raise UserError(
            f"stem '{name}' says by reach_sides={stem.reach_sides} that a token sees at most "
            f"{found[0].reach_declared} pixels beyond its patch; measured were "
            f"{found[0].reach_measured}, so masks that act on pixels would go by a wrong number. "
            "Mend reach_sides"
        )
    return found


_HOW = {
    None: "",
    "all": " (batch statistics of all patches)",
    "visible": " (batch statistics of visible patches)",
    "frozen": " (frozen statistics)",
    "running": " (running statistics)",
}


def say(measured: list[Leak]) -> str:
    """The audit of one run for a person: eval mode, then training."""
    lines = ["leak: on four images of noise, pixels under the mask move"]
    for leak in measured:
        mode = {"eval": "in eval mode", "train": "in training"}[leak.mode]
        moved = (
            f"{leak.visible_moved:.1%} of the visible tokens, by {leak.mean_relative:.1%} on "
            f"average, {leak.max_relative:.1%} at most"
            if leak.visible_moved
            else "no visible token"
        )
        lines.append(f"  {mode}{_HOW[leak.bn]}: {moved}")
    return "\n".join(lines)
