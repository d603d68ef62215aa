"""Features of a frozen teacher, one vector a patch: what MVP, EVA and data2vec predict.

The teacher is a model of timm's with weights from a file, or an encoder that `mimkit export` wrote.
Sources: Wei et al. 2022 (MVP); Fang et al. 2023 (EVA); Baevski et al. 2022 (data2vec).
"""

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer
from mimkit.tokenizers._fingerprint import fingerprint
from mimkit.tokenizers._teacher import Pixels, Teacher, load_teacher
from mimkit.tokenizers._words import computing_in


@TOKENIZERS.register
class FeatureTokenizer(VisualTokenizer):
    """Patch features behind the teacher's last block and its last norm, always in eval and fp32.

    Args:
        path: weights under timm's names (safetensors, or a .pth of tensors only), or a file of
            `mimkit export`; "random" draws a teacher from seed 0, for comparison.
        architecture: timm's name of the teacher; not for a file of `mimkit export`, which says it.
        normalise: `layer` takes the mean off each vector and divides by its deviation, without
            weights (EVA, data2vec); `none` leaves the features as they are.
        loss: `cosine`, one minus the similarity (EVA, MVP); `smooth_l1` with beta 1; `mse`.
        mean, std: of the pixels the teacher was trained on; by default what the file of
            `mimkit export`, or timm for this architecture, says.

    Raises:
        UserError: the file is missing, of another kind, or does not fit the architecture.
    """

    vocabulary = None

    def __init__(
        self,
        *,
        path: str,
        architecture: str | None = None,
        normalise: Literal["layer", "none"] = "layer",
        loss: Literal["cosine", "smooth_l1", "mse"] = "cosine",
        mean: Pixels | None = None,
        std: Pixels | None = None,
    ) -> None:
        super().__init__()
        self.teacher: Teacher = load_teacher(path, architecture)
        self.normalise, self.measure = normalise, loss
        self.mean, self.std = mean or self.teacher.mean, std or self.teacher.std
        self.patch, self.prediction_dim = self.teacher.patch, self.teacher.width
        decides = f"features {self.teacher.what} {normalise} {self.mean} {self.std}"
        self.fingerprint = fingerprint(decides, self.teacher)
        self.requires_grad_(False)
        self.eval()

    def grid(self, height: int, width: int) -> Grid:
        """Rows and columns of features; UserError where the teacher can not see such a view."""
        fixed = self.teacher.fixed_size
        if fixed is not None and fixed != (height, width):
            raise UserError(
                f"the teacher {self.teacher.what} sees {fixed[0]} x {fixed[1]} pixels and no other "
                f"size, but the token view has {height} x {width}; set data.token_size={fixed[0]}"
            )
        return super().grid(height, width)

    @torch.no_grad()
    def encode(self, view_BChw: Tensor) -> Tensor:
        """float32 in [0, 1] -> target_BNV, float32.

        A view of another size than the teacher's own is seen with resampled positions.
        """
        self.grid(view_BChw.shape[-2], view_BChw.shape[-1])
        mean_C11 = view_BChw.new_tensor(self.mean)[:, None, None]
        std_C11 = view_BChw.new_tensor(self.std)[:, None, None]
        with computing_in("fp32", view_BChw.device):
            feature_BVyx = self.teacher((view_BChw - mean_C11) / std_C11)
            feature_BNV = rearrange(feature_BVyx, "b v y x -> b (y x) v")
            if self.normalise == "none":
                return feature_BNV.contiguous()
            return nn.functional.layer_norm(feature_BNV, feature_BNV.shape[-1:])

    def loss(self, predicted_MV: Tensor, target_M: Tensor) -> Tensor:
        """Mean over the masked patches (and, of differences, over the numbers), in fp32."""
        predicted_MV = predicted_MV.float()
        if self.measure == "cosine":
            return 1 - nn.functional.cosine_similarity(predicted_MV, target_M).mean()
        if self.measure == "smooth_l1":
            return nn.functional.smooth_l1_loss(predicted_MV, target_M)
        return nn.functional.mse_loss(predicted_MV, target_M)
