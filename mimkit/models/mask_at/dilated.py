"""After the stem, with the mask widened by what the stem sees, so that no visible token saw it."""

import math

from torch import Tensor
from torch.nn import functional

from mimkit.batch import Grid
from mimkit.models.mask_at import MASK_AT, MaskAt
from mimkit.models.stems import Stem


@MASK_AT.register
class Dilated(MaskAt):
    """Every token that can see a masked pixel is replaced by the mask token.

    Tokens of the rim are hidden but not predicted: the targets are those of the other placements,
    the visible patches are fewer. For patchwise stems it is `after_stem`. Batch statistics over all
    patches still carry masked pixels everywhere; stem.statistics=visible ends that.
    """

    def hidden(self, mask_BN: Tensor, *, stem: Stem, grid: Grid) -> Tensor:
        before, behind = (math.ceil(side / stem.patch_size) for side in stem.reach_sides)
        mask_B1rc = mask_BN.view(-1, 1, *grid).float()
        seen_B1rc = functional.pad(mask_B1rc, (before, behind, before, behind))
        window = before + 1 + behind
        return functional.max_pool2d(seen_B1rc, window, stride=1).flatten(1).bool()
