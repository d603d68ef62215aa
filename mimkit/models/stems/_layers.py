"""A stem that is a list of layers on feature maps: convolutions, norms, activations."""

from collections.abc import Iterable
from typing import Literal

from einops import rearrange
from torch import Tensor, nn

from mimkit.models.norms import BatchNorm2d, ChannelLayerNorm
from mimkit.models.stems import Stem
from mimkit.models.stems._reach import reach_of

Norm = Literal["bn", "ln"]
NORMS = {"bn": BatchNorm2d, "ln": ChannelLayerNorm}


class LayeredStem(Stem):
    """Applies `layers` one after the other and reads the map row by row."""

    def __init__(self, *, width: int, patch_size: int, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.width = width
        self.patch_size = patch_size
        self.layers = nn.Sequential(*layers)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        self.grid(*image_BCHW.shape[2:])
        tokens_BDHW: Tensor = self.layers(image_BCHW)
        return rearrange(tokens_BDHW, "b d h w -> b (h w) d")

    @property
    def reach(self) -> int:
        return reach_of(self.layers)
