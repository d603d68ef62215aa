"""What a tokenizer makes of views as they are, and of views that were changed a little.

Shape letters as in `batch`; r c rows and columns of patches, V numbers of a target that is no word.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from mimkit.batch import Batch, Grid, to_unit
from mimkit.errors import UserError
from mimkit.tokenizers import VisualTokenizer

QUALITIES = (90, 75)  # of JPEG
Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Observed:
    """Targets of the same images, each target_BN or target_BNV on the CPU.

    Attributes:
        target: of the token views as they are.
        shifted: of the token views moved one pixel to the right (the left column is repeated).
        recompressed: by the quality, of the token views saved as JPEG and read back.
        same_crop: of the encoder's views, resized to the size of the token views.
        moved_crop: of those moved one whole patch to the right, as if the crop were another.
    """

    grid: Grid
    target: Tensor
    shifted: Tensor
    recompressed: dict[int, Tensor]
    same_crop: Tensor
    moved_crop: Tensor


@torch.no_grad()
def observe(
    tokenizer: VisualTokenizer, views: Sequence[Batch], *, device: torch.device | str = "cpu"
) -> Observed:
    """Encodes every view six times; UserError where a target is not finite."""
    height, width = views[0].token_view_BChw.shape[2:]
    grid = tokenizer.grid(height, width)

    def encode(view_BChw: Tensor) -> Tensor:
        return tokenizer.encode(view_BChw.to(device)).cpu()

    def moved(view_BChw: Tensor) -> Tensor:
        return _moved_right(view_BChw, pixels=width // grid[1])

    def all_of(changed: Sequence[Tensor]) -> Tensor:
        target = torch.cat([encode(view_BChw) for view_BChw in changed])
        _check_finite(target)
        return target

    token_views = [to_unit(batch.token_view_BChw) for batch in views]
    same_crops = [resized(to_unit(batch.patch_view_BCHW), (height, width)) for batch in views]
    return Observed(
        grid=grid,
        target=all_of(token_views),
        shifted=all_of([_moved_right(view, pixels=1) for view in token_views]),
        recompressed={
            quality: all_of([_recompressed(batch.token_view_BChw, quality) for batch in views])
            for quality in QUALITIES
        },
        same_crop=all_of(same_crops),
        moved_crop=all_of([moved(view) for view in same_crops]),
    )


def _check_finite(target: Tensor) -> None:
    if not target.isfinite().all():
        share = 1 - float(target.isfinite().float().mean())
        raise UserError(
            f"{share:.1%} of the numbers in the tokenizer's targets are not finite, where all must "
            "be: its weights are damaged, or overflow in their precision. Get them again, or set "
            "tokenizer.precision=fp32 where the tokenizer has that setting"
        )


def _moved_right(view_BChw: Tensor, *, pixels: int) -> Tensor:
    return pad(view_BChw, (pixels, 0, 0, 0), mode="replicate")[..., :-pixels]


def _recompressed(view_u8_BChw: Tensor, quality: int) -> Tensor:
    again = []
    for view_hwC in view_u8_BChw.permute(0, 2, 3, 1).cpu().numpy():
        buffer = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(view_hwC)).save(buffer, "JPEG", quality=quality)
        again.append(torch.from_numpy(np.array(Image.open(buffer))))
    return to_unit(torch.stack(again).permute(0, 3, 1, 2))


def resized(view_BChw: Tensor, size: tuple[int, int]) -> Tensor:
    """In [0, 1]; bicubic, of averages where it becomes smaller."""
    return interpolate(view_BChw, size, mode="bicubic", antialias=True).clamp(0, 1)


def agreement(one: Tensor, other: Tensor) -> float:
    """How far two sets of targets agree: 1 if they are equal.

    Words: the share of the patches that have the same one. Numbers: 1 - E|a - b|^2 / (var a +
    var b), which is 0 for two that have nothing to do with each other (Lin's concordance).
    """
    if not one.is_floating_point():
        return float((one == other).float().mean())
    apart = float((one - other).square().mean())
    spread = _variance(one) + _variance(other)
    return 1 - apart / spread if spread else float(apart == 0)


def _variance(target: Tensor) -> float:
    """Mean over the numbers of a target of their variance over images and patches."""
    flat_MV = target.flatten(0, -2)
    return float((flat_MV - flat_MV.mean(0)).square().mean())


def relative_spread(target_BNV: Tensor) -> float:
    """Standard deviation over images and patches, as a share of the targets' root mean square."""
    square = float(target_BNV.square().mean())
    return float((_variance(target_BNV) / square) ** 0.5) if square else 0.0


def agreement_around(target: Tensor, other: Tensor, *, grid: Grid) -> Table | None:
    """Agreement of each patch of `target` with its place in `other` and with the eight around it.

    Rows go from the patch above to the one below, columns from left to right; the rim, which has
    no neighbours, is left out. None for a grid without inner patches.
    """
    rows, columns = (side - 2 for side in grid)  # without the rim
    if min(rows, columns) < 1:
        return None
    target_Brc, other_Brc = (t.view(len(t), *grid, *t.shape[2:]) for t in (target, other))
    inner = target_Brc[:, 1:-1, 1:-1]
    return tuple(
        tuple(agreement(inner, other_Brc[:, y : y + rows, x : x + columns]) for x in range(3))
        for y in range(3)
    )
