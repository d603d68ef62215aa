"""The pixels themselves: MAE's and SimMIM's target, one vector of 3 p^2 numbers a patch.

Sources: He et al. 2022 (MAE), models_mae.py, `patchify` and `norm_pix_loss`; Xie et al. 2022
(SimMIM).
"""

import hashlib
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer

_EPS = 1e-6  # MAE's, beside the variance
_DEVIATIONS = 3.0  # from the patch's mean (grey) to black or white in a picture


@TOKENIZERS.register
class PixelTokenizer(VisualTokenizer):
    """Numbers of a patch stand row by row, column by column, channel by channel (MAE's p p 3).

    MAE is the default with a token view as large as the image; SimMIM is normalise=none, loss=l1
    (its pixels are shifted and scaled by a constant besides, which scales the loss).

    Args:
        patch: pixels of the token view along a side of a patch.
        normalise: `patch` takes each patch's own mean off and divides by the root of its own
            variance (over 3 p^2 - 1) plus 1e-6; `none` leaves pixels in [0, 1].
        loss: `mse` or `l1`, the mean over all numbers of the masked patches.
    """

    vocabulary = None

    def __init__(
        self,
        *,
        patch: int = 16,
        normalise: Literal["patch", "none"] = "patch",
        loss: Literal["mse", "l1"] = "mse",
    ) -> None:
        super().__init__()
        if patch < 1:
            raise UserError(f"tokenizer.patch is {patch}; expected at least 1 pixel, MAE has 16")
        self.patch, self.normalise = patch, normalise
        self.measure = nn.functional.mse_loss if loss == "mse" else nn.functional.l1_loss
        self.prediction_dim = 3 * patch**2
        decides = f"pixels {patch} {normalise} p p 3 {_EPS}"
        self.fingerprint = hashlib.sha256(decides.encode()).hexdigest()

    @torch.no_grad()
    def encode(self, view_BChw: Tensor) -> Tensor:
        """float32 in [0, 1] -> target_BNV, float32."""
        self.grid(view_BChw.shape[-2], view_BChw.shape[-1])
        pixel_BNV = rearrange(
            view_BChw, "b c (y p) (x q) -> b (y x) (p q c)", p=self.patch, q=self.patch
        )
        if self.normalise == "none":
            return pixel_BNV
        mean_BN1 = pixel_BNV.mean(dim=-1, keepdim=True)
        variance_BN1 = pixel_BNV.var(dim=-1, keepdim=True)
        return (pixel_BNV - mean_BN1) / (variance_BN1 + _EPS).sqrt()

    def loss(self, predicted_MV: Tensor, target_M: Tensor) -> Tensor:
        """Mean over the numbers of all masked patches, in fp32."""
        return self.measure(predicted_MV.float(), target_M)

    def decode(self, target_BN: Tensor, grid: Grid) -> Tensor:
        """Targets -> image_BChw in [0, 1].

        Normalised patches do not say how bright they were: each is drawn in its own contrast around
        grey, three deviations to black and to white. So predictions are seen as the loss sees them.
        """
        if self.normalise == "patch":
            target_BN = 0.5 + target_BN / (2 * _DEVIATIONS)
        rows, columns = grid
        image_BChw = rearrange(
            target_BN, "b (y x) (p q c) -> b c (y p) (x q)",
            y=rows, x=columns, p=self.patch, q=self.patch,
        )  # fmt: skip
        return image_BChw.clamp(0, 1)
