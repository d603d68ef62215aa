"""The stem of ViT, DeiT and BEiT: one convolution whose kernel is the patch."""

from einops import rearrange
from torch import Tensor, nn

from mimkit.models.stems import STEMS, Stem
from mimkit.models.stems._reach import reach_of


@STEMS.register
class Linear(Stem):
    """Conv2d(3 -> D, kernel = stride = patch size) with bias; timm's PatchEmbed has the same.

    Args:
        width: D.
        patch_size: side of a patch in pixels.
        gelu: a GELU behind it, a row of the paper's Table 7 (which it makes worse).
    """

    def __init__(self, *, width: int, patch_size: int = 16, gelu: bool = False) -> None:
        super().__init__()
        self.width = width
        self.patch_size = patch_size
        self.project = nn.Conv2d(3, width, patch_size, patch_size)
        self.activation = nn.GELU() if gelu else nn.Identity()
        self.gelu = gelu

    def forward(self, image_BCHW: Tensor) -> Tensor:
        self.grid(*image_BCHW.shape[2:])
        tokens_BDHW: Tensor = self.activation(self.project(image_BCHW))
        return rearrange(tokens_BDHW, "b d h w -> b (h w) d")

    @property
    def reach(self) -> int:
        return reach_of([self.project])

    @property
    def settings(self) -> dict[str, int | str]:
        return {"width": self.width, "patch_size": self.patch_size, "gelu": self.gelu}
