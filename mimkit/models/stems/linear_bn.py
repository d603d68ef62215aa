"""The linear stem with BatchNorm, and GELU on request: two of the paper's four linear rows."""

from torch import nn

from mimkit.models.norms import BatchNorm2d
from mimkit.models.stems import STEMS
from mimkit.models.stems._layers import LayeredStem


@STEMS.register
class LinearBn(LayeredStem):
    """Conv2d(3 -> D, kernel = stride = patch size), BatchNorm, then GELU if `gelu`.

    The order norm, GELU is the order of the columns of the paper's Table 7; the text gives none.
    """

    def __init__(self, *, width: int, patch_size: int = 16, gelu: bool = False) -> None:
        convolution = nn.Conv2d(3, width, patch_size, patch_size)
        activation = [nn.GELU()] if gelu else []
        layers = [convolution, BatchNorm2d(width), *activation]
        super().__init__(width=width, patch_size=patch_size, layers=layers)
        self.gelu = gelu

    @property
    def settings(self) -> dict[str, int | str]:
        return {"width": self.width, "patch_size": self.patch_size, "gelu": self.gelu}
