"""Where the mask acts on the way from pixels to tokens. Contract, and the registry."""

from collections.abc import Callable

import torch
from torch import Tensor

from mimkit.batch import Grid
from mimkit.models.stems import Stem
from mimkit.registry import Registry


class MaskAt:
    """(stem, image, mask, mask token) -> tokens_BND in which masked patches hold the mask token.

    What differs is what the stem sees (`pixels`) and which tokens are replaced (`hidden`): all
    that `mask_BN` names, and more where that is the placement's point. Predicted are always the
    patches of the mask itself, so that losses of all placements are about the same targets.
    """

    def tokens(self, stem: Stem, image_BCHW: Tensor, mask_BN: Tensor, token_11D: Tensor) -> Tensor:
        grid = stem.grid(*image_BCHW.shape[2:])
        hidden_BN = self.hidden(mask_BN, stem=stem, grid=grid)
        tokens_BND: Tensor = stem(self.pixels(image_BCHW, mask_BN, grid=grid), hidden_BN)
        return torch.where(hidden_BN[..., None], token_11D, tokens_BND)

    def pixels(self, image_BCHW: Tensor, mask_BN: Tensor, *, grid: Grid) -> Tensor:
        """What the stem sees of the (normalised) image."""
        return image_BCHW

    def hidden(self, mask_BN: Tensor, *, stem: Stem, grid: Grid) -> Tensor:
        """hidden_BN: which tokens the encoder gets the mask token for."""
        return mask_BN


MASK_AT: Registry[Callable[..., MaskAt]] = Registry("mask_at", __name__)
