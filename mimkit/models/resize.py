"""Positions for another number of patches: an encoder at another size of images.

Absolute embeddings are interpolated as timm's `resample_abs_pos_embed` does it, so that a model in
timm's VisionTransformer and ours agree at every size; relative tables head by head, on their
(2 rows - 1) x (2 columns - 1) offsets, as Swin does. BEiT's own rule is in `geometric`.
"""

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimkit.batch import Grid
from mimkit.models.encoder import ImageEncoder
from mimkit.models.positions import RelativePositionBias

_EXTRA = 3  # rows of a relative table behind those of pairs of patches


def resize_absolute(positions_1ND: Tensor, *, old: Grid, new: Grid) -> Tensor:
    """Embeddings of a class token and `old` patches -> of a class token and `new` patches.

    Bicubic with antialiasing, in float32; the class token's stays as it is.
    """
    if old == new:
        return positions_1ND
    class_11D, patches_1ND = positions_1ND[:, :1], positions_1ND[:, 1:]
    maps_1Drc = patches_1ND.float().transpose(1, 2).reshape(1, -1, *old)
    sized_1Drc = functional.interpolate(maps_1Drc, list(new), mode="bicubic", antialias=True)
    sized_1ND = sized_1Drc.flatten(2).transpose(1, 2)
    return torch.cat([class_11D, sized_1ND.to(positions_1ND.dtype)], 1)


def resize_relative(table_PK: Tensor, *, old: Grid, new: Grid) -> Tensor:
    """A relative table for a grid of `old` patches -> for one of `new` patches.

    Bicubic, in float32, each head on its own; the three rows of the class token stay as they are.
    """
    return resize_maps(table_PK, _bicubic, old=old, new=new)


def resize_maps(table_PK: Tensor, rule: Callable[..., Tensor], *, old: Grid, new: Grid) -> Tensor:
    """A relative table by `rule(maps_Kyx, old=old, new=new)`, which sees a map a head."""
    if old == new:
        return table_PK
    pairs_PK, extra_3K = table_PK[:-_EXTRA], table_PK[-_EXTRA:]
    maps_Kyx = pairs_PK.detach().float().T.reshape(-1, *_offsets(old))
    sized_Kyx = rule(maps_Kyx, old=old, new=new)
    return torch.cat([sized_Kyx.flatten(1).T.to(table_PK.dtype), extra_3K])


def _bicubic(maps_Kyx: Tensor, *, old: Grid, new: Grid) -> Tensor:
    return functional.interpolate(maps_Kyx[None], _offsets(new), mode="bicubic")[0]


def resized(
    model: ImageEncoder, grid: Grid, *, relative: Callable[..., Tensor] = resize_relative
) -> ImageEncoder:
    """`model` for images of `grid` patches: positions of its own, every other weight shared.

    The same grid gives `model` itself. `relative` resizes tables of relative positions.
    """
    old = model.encoder.grid
    if grid == old:
        return model
    weights = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(weight): weight for weight in weights})
    encoder = twin.encoder
    encoder.grid = grid
    if encoder.pos_embed is not None:
        encoder.pos_embed = _like(
            encoder.pos_embed, resize_absolute(encoder.pos_embed, old=old, new=grid)
        )
    for bias in encoder.relative:
        _set_table(cast(RelativePositionBias, bias), old=old, new=grid, relative=relative)
    return twin


def _set_table(
    bias: RelativePositionBias, *, old: Grid, new: Grid, relative: Callable[..., Tensor]
) -> None:
    of_grid = RelativePositionBias(grid=new, heads=bias.table.shape[1])
    bias.table = _like(bias.table, relative(bias.table, old=old, new=new))
    bias.tokens, bias.index = of_grid.tokens, of_grid.index.to(bias.table.device)


def _offsets(grid: Grid) -> list[int]:
    """How many different offsets two patches can have, down and across."""
    return [2 * side - 1 for side in grid]


def _like(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad)
