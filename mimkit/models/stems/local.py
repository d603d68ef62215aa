"""A local transformer as stem: TNT's pixel embedding with its inner transformer (Han et al. 2021).

The row "local transformer" of the paper's Table 7 cites TNT and does not say how it was built.
Ours is TNT's pixel embedding as published, followed by inner blocks only: 7x7 convolution of
stride 4 to D/16 channels (TNT-S: 384 / 24, TNT-B: 640 / 40), learned positions within the patch,
pre-norm blocks with 4 heads that attend within a patch, then LayerNorm, one linear layer over all
pixels of the patch, LayerNorm. The number of inner blocks, 16, is our choice: it gives 19.09 GFLOPs
at ViT-B/224 beside the paper's 19.12 (17: 19.19). The 7x7 convolution sees 3 pixels of the
neighbours above and to the left, as TNT's does, so masking after this stem leaks a little.
"""

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.models.blocks import EPS, Block
from mimkit.models.stems import STEMS, Stem
from mimkit.models.stems._reach import reach_of

_STRIDE = 4  # of the pixel embedding
_HEADS = 4


@STEMS.register
class Local(Stem):
    """Pixel embedding, a transformer within each patch, one linear layer to the token.

    Args:
        width: D, a multiple of 16.
        patch_size: a multiple of 4, 8 at least (of 4 there would be one pixel token a patch).
        depth: inner blocks.
    """

    def __init__(self, *, width: int, patch_size: int = 16, depth: int = 16) -> None:
        super().__init__()
        _check(width, patch_size, depth)
        self.width, self.patch_size, self.depth = width, patch_size, depth
        self.side = patch_size // _STRIDE
        inner, pixels = width // 16, self.side**2
        self.embed = nn.Conv2d(3, inner, 7, _STRIDE, 3)
        self.pos_embed = nn.Parameter(torch.zeros(1, pixels, inner))
        heads = math.gcd(_HEADS, inner)
        self.blocks = nn.ModuleList(Block(inner, heads=heads, qkv_bias="qkv") for _ in range(depth))
        self.norm_pixels = nn.LayerNorm(pixels * inner, eps=EPS)
        self.project = nn.Linear(pixels * inner, width)
        self.norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, image_BCHW: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        rows, columns = self.grid(*image_BCHW.shape[2:])
        pixels_BNpd = rearrange(self.embed(image_BCHW), "b d (r y) (c x) -> b (r c) (y x) d",
                                r=rows, c=columns)  # fmt: skip
        if mask_BN is None:
            shape = (*pixels_BNpd.shape[:2], self.width)
            return self._tokens(pixels_BNpd.flatten(0, 1)).view(shape)
        visible_RD = self._tokens(pixels_BNpd[~mask_BN])
        tokens_BND = visible_RD.new_zeros(*mask_BN.shape, self.width)
        return tokens_BND.masked_scatter(~mask_BN[..., None], visible_RD)

    def _tokens(self, pixels_Rpd: Tensor) -> Tensor:
        """Each of R patches on its own."""
        pixels_Rpd = pixels_Rpd + self.pos_embed
        for block in self.blocks:
            pixels_Rpd = block(pixels_Rpd)
        tokens_RD: Tensor = self.norm(self.project(self.norm_pixels(pixels_Rpd.flatten(1))))
        return tokens_RD

    @property
    def reach_sides(self) -> tuple[int, int]:
        merge = nn.Conv2d(1, 1, self.side, self.side, device="meta")  # everything within a patch
        return reach_of([self.embed, merge])

    @property
    def settings(self) -> dict[str, int | str]:
        return {"width": self.width, "patch_size": self.patch_size, "depth": self.depth}


def _check(width: int, patch_size: int, depth: int) -> None:
    if patch_size % _STRIDE or patch_size < 2 * _STRIDE:
        raise UserError(
            f"stem 'local' has no patches of {patch_size}: its pixel tokens are {_STRIDE} pixels "
            f"wide; set encoder.patch_size to 8, 16 or 32, or stem.name to linear"
        )
    if width % 16:
        raise UserError(f"stem 'local' needs a width that is a multiple of 16, not {width}")
    if depth < 1:
        raise UserError(f"stem.depth is {depth}; stem 'local' has at least 1 inner block")
