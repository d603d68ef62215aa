"""The stem of LeViT (Graham et al. 2021), the paper's convolutional comparison."""

import math
from itertools import pairwise
from typing import Literal

from torch import nn

from mimkit.errors import UserError
from mimkit.models.norms import Statistics
from mimkit.models.stems import STEMS
from mimkit.models.stems._layers import LayeredStem, Norm, make_norm

ACTIVATIONS = {"gelu": nn.GELU, "hardswish": nn.Hardswish}


@STEMS.register
class Levit(LayeredStem):
    """3x3 convolutions of stride 2 without bias, each with a norm, activations between them.

    For 16 x 16: four of them, channels D/8, D/4, D/2, D (`b16` in facebookresearch/LeViT); another
    power of two has one for each halving, ending in D. They overlap, so tokens see beyond their
    patch: masking after this stem leaks.

    Args:
        width: D, divisible by 2 for every convolution but the last.
        patch_size: 4, 8, 16 or 32.
        norm: "bn", "ln" over channels, or "none" (then convolutions have a bias).
        statistics: of "bn": "all" (the paper's), "visible" or "frozen", see `BatchNorm2d`.
        activation: "gelu", the paper's table, or "hardswish", LeViT's code.
    """

    def __init__(
        self,
        *,
        width: int,
        patch_size: int = 16,
        norm: Norm = "bn",
        statistics: Statistics = "all",
        activation: Literal["gelu", "hardswish"] = "gelu",
    ) -> None:
        if patch_size not in (4, 8, 16, 32):
            raise UserError(
                f"stem 'levit' halves the image, so it has no patches of {patch_size}; set "
                "encoder.patch_size to 4, 8, 16 or 32, or stem.name to linear"
            )
        halvings = int(math.log2(patch_size))
        if width % 2 ** (halvings - 1):
            raise UserError(f"stem 'levit' needs a width divisible by {2 ** (halvings - 1)}")
        channels = [3, *(width // 2**left for left in reversed(range(halvings)))]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(channels):
            layers += [] if inputs == 3 else [ACTIVATIONS[activation]()]
            layers.append(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=norm == "none"))
            layers.append(make_norm(norm, outputs, statistics=statistics))
        super().__init__(width=width, patch_size=patch_size, layers=layers)
        self.norm, self.statistics, self.activation = norm, statistics, activation

    @property
    def settings(self) -> dict[str, int | str]:
        return {"width": self.width, "patch_size": self.patch_size, "norm": self.norm,
                "statistics": self.statistics, "activation": self.activation}  # fmt: skip
