"""BEiT v2's tokenizer: a ViT whose projected tokens are replaced by the nearest code of a book.

Source: Peng et al. 2022 (BEiT v2), modeling_vqkd.py, norm_ema_quantizer.py.
"""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


class Vqkd(nn.Module):
    """What is kept of the training: encoder, projection and codebook. V codes of C numbers.

    Args:
        width, heads, depth: of the encoder.
        patch_size: pixels along a side of a patch.
        image_size: pixels along a side that positions belong to; others resample them.
        vocabulary: V. code_dim: C (BEiT v2: 8192 and 32).
    """

    codebook_VC: Tensor  # rows of length 1

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        depth: int,
        patch_size: int,
        image_size: int,
        vocabulary: int,
        code_dim: int,
    ) -> None:
        super().__init__()
        self.encoder = VisionTransformer(
            img_size=image_size, patch_size=patch_size, embed_dim=width, depth=depth,
            num_heads=heads, num_classes=0, global_pool="", dynamic_img_size=True,
        )  # fmt: skip
        self.project = _mlp(width, code_dim)
        self.register_buffer("codebook_VC", torch.zeros(vocabulary, code_dim))

    def directions(self, view_BChw: Tensor) -> Tensor:
        """float32 in [0, 1] -> direction_BNC of length 1: what is compared with the codes; fp32."""
        token_BND = self.encoder.forward_features(view_BChw * 2 - 1)[:, 1:]
        with torch.autocast(view_BChw.device.type, enabled=False):
            return nn.functional.normalize(self.project(token_BND.float()), dim=-1)

    def nearest(self, direction_BNC: Tensor) -> Tensor:
        """The code of the largest cosine; int64, target_BN."""
        with torch.autocast(direction_BNC.device.type, enabled=False):
            return (direction_BNC @ self.codebook_VC.T).argmax(dim=-1)


class VqkdDecoder(nn.Module):
    """Codes -> predicted features of the teacher; thrown away after the training.

    Args:
        width, heads, depth: as of the encoder; BEiT v2 has 3 blocks, or 1.
        grid: patches along a side.
        code_dim: C. features: width of the teacher.
    """

    def __init__(
        self, *, width: int, heads: int, depth: int, grid: int, code_dim: int, features: int
    ) -> None:
        super().__init__()
        self.blocks = VisionTransformer(
            img_size=grid, patch_size=1, in_chans=code_dim, embed_dim=width, depth=depth,
            num_heads=heads, num_classes=0, global_pool="",
        )  # fmt: skip
        self.head = _mlp(width, features)

    def forward(self, code_BNC: Tensor) -> Tensor:
        side = self.blocks.patch_embed.img_size[0]
        code_BCyx = code_BNC.mT.unflatten(2, (side, side))
        feature_BNV: Tensor = self.head(self.blocks.forward_features(code_BCyx)[:, 1:])
        return feature_BNV


def _mlp(width: int, out: int) -> nn.Sequential:
    """BEiT v2's task layer: normal weights of deviation 0.02 cut at 2, zero biases."""
    first, last = nn.Linear(width, width), nn.Linear(width, out)
    for layer in (first, last):
        nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.Tanh(), last)


def code_colours(codebook_VC: Tensor) -> Tensor:
    """A colour for each code, near codes in near colours: its place along the three directions in
    which the book is widest, by rank; in [0, 1], V3."""
    centred_VC = codebook_VC - codebook_VC.mean(dim=0)
    axes_C3 = torch.linalg.svd(centred_VC, full_matrices=False).Vh[:3].T
    rank_V3 = (centred_VC @ axes_C3).argsort(dim=0).argsort(dim=0)
    return rank_V3 / max(1, len(codebook_VC) - 1)
