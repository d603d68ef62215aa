"""The linear stem with BatchNorm, and GELU on request: two of the paper's four linear rows."""

from torch import nn

from mimkit.models.norms import BatchNorm2d, Statistics
from mimkit.models.stems import STEMS
from mimkit.models.stems._layers import LayeredStem
from mimkit.models.stems._rows import PatchConv2d
from mimkit.models.stems.linear import Linear


@STEMS.register
class LinearBn(LayeredStem):
    """Conv2d(3 -> D, kernel = stride = patch size), BatchNorm, then GELU if `gelu`.

    The order norm, GELU is the order of the columns of the paper's Table 7; the text gives none.

    Args:
        width: D.
        statistics: "all" (the paper's), "visible" or "frozen", see `BatchNorm2d`.
    """

    def __init__(
        self,
        *,
        width: int,
        patch_size: int = 16,
        gelu: bool = False,
        statistics: Statistics = "all",
    ) -> None:
        norm = BatchNorm2d(width, statistics=statistics)
        activation = [nn.GELU()] if gelu else []
        layers = [PatchConv2d(3, width, patch_size), norm, *activation]
        super().__init__(width=width, patch_size=patch_size, layers=layers)
        self.gelu, self.statistics = gelu, statistics

    @property
    def settings(self) -> dict[str, int | str]:
        return {"width": self.width, "patch_size": self.patch_size, "gelu": self.gelu,
                "statistics": self.statistics}  # fmt: skip

    def _without_norms(self) -> LayeredStem:
        return Linear(width=self.width, patch_size=self.patch_size, gelu=self.gelu)
