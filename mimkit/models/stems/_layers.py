"""A stem that is a list of layers: convolutions, norms, activations."""

import copy
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.models.norms import BatchNorm2d, ChannelLayerNorm, Statistics
from mimkit.models.stems import Stem
from mimkit.models.stems._reach import reach_of
from mimkit.models.stems._rows import PatchConv2d, pixel_rows

Norm = Literal["bn", "ln", "none"]


def make_norm(norm: Norm, channels: int, *, statistics: Statistics) -> nn.Module:
    """The norm of a stem; UserError where `statistics` would be without effect."""
    if norm == "bn":
        return BatchNorm2d(channels, statistics=statistics)
    if statistics != "all":
        raise UserError(
            f"stem.statistics={statistics} would do nothing: with stem.norm={norm} there are no "
            "batch statistics; leave it out, or set stem.norm=bn"
        )
    return ChannelLayerNorm(channels) if norm == "ln" else nn.Identity()


class LayeredStem(Stem):
    """Applies `sequence` one after the other and reads the map row by row.

    Where no token sees beyond its patch the layers work on rows instead of maps: the same numbers
    by matrix products (in bf16 on a CPU in 0.7 of the time), and masked patches are left out where
    nothing depends on them.
    """

    def __init__(self, *, width: int, patch_size: int, layers: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.width = width
        self.patch_size = patch_size
        self.layers = nn.Sequential(*layers)

    @property
    def sequence(self) -> Sequence[nn.Module]:
        """The layers in the order in which they are applied."""
        return list(self.layers)

    @property
    def reach_sides(self) -> tuple[int, int]:
        return reach_of(self.sequence)

    def forward(self, image_BCHW: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        grid = self.grid(*image_BCHW.shape[2:])
        if self.patchwise:
            return self._by_rows(image_BCHW, mask_BN)
        return rearrange(self._by_maps(image_BCHW, mask_BN, grid), "b d h w -> b (h w) d")

    def _by_rows(self, image_BCHW: Tensor, mask_BN: Tensor | None) -> Tensor:
        norms = [layer for layer in self.sequence if isinstance(layer, BatchNorm2d)]
        factors = [layer.factor for layer in self.sequence if isinstance(layer, PatchConv2d)]
        pixels_BNPC = pixel_rows(image_BCHW, factors)
        shape = (*pixels_BNPC.shape[:2], self.width)
        if mask_BN is None or not _picks_visible(norms, image_BCHW.device):
            return self._run(pixels_BNPC.flatten(0, 2)).view(shape)
        visible_RD = self._run(pixels_BNPC[~mask_BN].flatten(0, 1))
        return visible_RD.new_zeros(shape).masked_scatter(~mask_BN[..., None], visible_RD)

    def _run(self, rows: Tensor) -> Tensor:
        for layer in self.sequence:
            rows = layer(rows)
        return rows

    def _by_maps(self, image_BCHW: Tensor, mask_BN: Tensor | None, grid: Grid) -> Tensor:
        features = image_BCHW
        for layer in self.sequence:
            if mask_BN is not None and _asks_for_visible(layer):
                counted_Brc = ~mask_BN.view(-1, *grid)
                features = layer(features, _enlarged(counted_Brc, features.shape[-1] // grid[1]))
            else:
                features = layer(features)
        return features

    def folded(self) -> Stem:
        layers = self.sequence
        if not any(isinstance(layer, BatchNorm2d) for layer in layers):
            return super().folded()
        fused = [_fused(layer, after) for layer, after in pairwise([*layers, nn.Identity()])]
        convolutions = [layer for layer in fused if isinstance(layer, nn.Conv2d)]
        first = convolutions[0].weight
        with torch.device("meta"):  # draws no initial weights
            twin = self._without_norms()
        twin = twin.to_empty(device=first.device).to(first.dtype)
        targets = [layer for layer in twin.sequence if isinstance(layer, nn.Conv2d)]
        for target, source in zip(targets, convolutions, strict=True):
            target.load_state_dict(source.state_dict())
        return twin.eval().requires_grad_(False)

    def _without_norms(self) -> "LayeredStem":
        """The same stem, untrained, whose convolutions have a bias and no norm."""
        return type(self)(**{**self.settings, "norm": "none", "statistics": "all"})  # type: ignore[arg-type]


def _picks_visible(norms: Sequence[BatchNorm2d], device: torch.device) -> bool:
    """Whether masked rows are left out: where they must be and, on a CPU, where they may.

    A GPU would be waited for until it has said how many rows are left, for at most 2 % of a step.
    """
    if any(norm.counts_masked for norm in norms):
        return False
    visible_only = any(norm.training and norm.statistics == "visible" for norm in norms)
    return visible_only or device.type == "cpu"


def _asks_for_visible(layer: nn.Module) -> bool:
    return isinstance(layer, BatchNorm2d) and layer.training and layer.statistics == "visible"


def _enlarged(mask_Brc: Tensor, factor: int) -> Tensor:
    """Every place of the grid as factor x factor places of a map."""
    return mask_Brc.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def _fused(layer: nn.Module, after: nn.Module) -> nn.Module:
    """A convolution with the batch norm that follows it, in eval mode; other layers as they are."""
    if isinstance(layer, nn.Conv2d) and isinstance(after, BatchNorm2d):
        pair = copy.deepcopy(layer).eval(), copy.deepcopy(after).eval()
        return fuse_conv_bn_eval(*pair)
    return layer
