"""The stem of ViT, DeiT and BEiT: one convolution whose kernel is the patch."""

from collections.abc import Sequence

from torch import nn

from mimkit.models.stems import STEMS
from mimkit.models.stems._layers import LayeredStem
from mimkit.models.stems._rows import PatchConv2d


@STEMS.register
class Linear(LayeredStem):
    """Conv2d(3 -> D, kernel = stride = patch size) with bias; timm's PatchEmbed has the same.

    Args:
        width: D.
        patch_size: side of a patch in pixels.
        gelu: a GELU behind it, a row of the paper's Table 7 (which it makes worse).
    """

    def __init__(self, *, width: int, patch_size: int = 16, gelu: bool = False) -> None:
        super().__init__(width=width, patch_size=patch_size)
        self.project = PatchConv2d(3, width, patch_size)
        self.activation = nn.GELU() if gelu else nn.Identity()
        self.gelu = gelu

    @property
    def sequence(self) -> Sequence[nn.Module]:
        return [self.project, self.activation]

    @property
    def settings(self) -> dict[str, int | str]:
        return {"width": self.width, "patch_size": self.patch_size, "gelu": self.gelu}
