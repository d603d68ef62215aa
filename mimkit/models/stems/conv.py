"""The convolutional stem of Xiao et al. 2021, "Early convolutions help transformers see better"."""

from typing import Literal

from torch import nn

from mimkit.errors import UserError
from mimkit.models.norms import Statistics
from mimkit.models.stems import STEMS
from mimkit.models.stems._layers import LayeredStem, Norm, make_norm

# Channels and strides of the 3x3 convolutions, by the size of ViT they were made for.
PLANS = {
    "1gf": ((24, 2), (48, 2), (96, 2), (192, 2)),
    "4gf": ((48, 2), (96, 2), (192, 2), (384, 2)),
    "18gf": ((64, 2), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
}


@STEMS.register
class Conv(LayeredStem):
    """3x3 convolutions without bias, each with BatchNorm and ReLU, then a 1x1 convolution to D.

    Xiao et al. take one transformer block away to pay for it; here that is the study's choice
    (`encoder.depth`). The convolutions overlap, so masking after this stem leaks.

    Args:
        width: D.
        patch_size: 16; the plans halve the image four times.
        plan: "1gf" (made for ViT-Ti), "4gf" (S) or "18gf" (B and L).
        norm: "bn", the published one; "ln" over channels; or "none" (3x3s then have a bias).
        statistics: of "bn": "all" (the paper's), "visible" or "frozen", see `BatchNorm2d`.
    """

    def __init__(
        self,
        *,
        width: int,
        patch_size: int = 16,
        plan: Literal["1gf", "4gf", "18gf"] = "4gf",
        norm: Norm = "bn",
        statistics: Statistics = "all",
    ) -> None:
        if patch_size != 16:
            raise UserError(
                f"stem 'conv' has no patches of {patch_size}: its channel plans are for 16; set "
                "encoder.patch_size=16, or stem.name to linear, hmlp, levit or local"
            )
        layers: list[nn.Module] = []
        inputs = 3
        for outputs, stride in PLANS[plan]:
            layers.append(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=norm == "none"))
            layers += [make_norm(norm, outputs, statistics=statistics), nn.ReLU()]
            inputs = outputs
        layers.append(nn.Conv2d(inputs, width, 1))
        super().__init__(width=width, patch_size=patch_size, layers=layers)
        self.plan, self.norm, self.statistics = plan, norm, statistics

    @property
    def settings(self) -> dict[str, int | str]:
        return {"width": self.width, "patch_size": self.patch_size, "plan": self.plan,
                "norm": self.norm, "statistics": self.statistics}  # fmt: skip
