"""What the tokenizers of DALL-E's architecture have in common: one word for 8 x 8 pixels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.tokenizers import VisualTokenizer
from mimkit.tokenizers._dvae_model import DOWNSAMPLING

Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Self = TypeVar("Self", bound="WordTokenizer")


class WordTokenizer(VisualTokenizer):
    """Frozen and always in eval mode; its targets are words, judged by cross-entropy."""

    vocabulary: int

    def freeze(self) -> None:
        """What a part calls when its networks are in place."""
        # 1.4 times faster on CPU; the words are the same but for ties within rounding.
        self.to(memory_format=torch.channels_last)
        self.requires_grad_(False)
        self.eval()

    def train(self: Self, mode: bool = True) -> Self:
        """Stays in eval mode: it is never trained by the encoder's loss."""
        super().train(False)
        return self

    def grid(self, height: int, width: int) -> Grid:
        """Rows and columns of words, an eighth of the pixels; UserError if that is not whole."""
        if min(height, width) < DOWNSAMPLING or height % DOWNSAMPLING or width % DOWNSAMPLING:
            name = type(self).__module__.rpartition(".")[2]
            raise UserError(
                f"tokenizer '{name}' makes one token of {DOWNSAMPLING} x {DOWNSAMPLING} pixels, "
                f"which a token view of {height} x {width} is no multiple of; set "
                f"data.token_size to {DOWNSAMPLING} times the number of patches along a side "
                "(BEiT: 112, for 14 x 14)"
            )
        return height // DOWNSAMPLING, width // DOWNSAMPLING

    def loss(self, predicted_MV: Tensor, target_M: Tensor) -> Tensor:
        """Cross-entropy in nats, in fp32, mean over the masked patches."""
        return nn.functional.cross_entropy(predicted_MV.float(), target_M)


@contextmanager
def computing_in(precision: Precision, device: torch.device) -> Iterator[None]:
    """This precision whatever autocast is around; no TF32 (cuDNN's default for convolutions): it
    is no fp32, and near ties would flip."""
    cudnn, dtype = torch.backends.cudnn, _DTYPES.get(precision)
    with (
        torch.autocast(device.type, dtype=dtype, enabled=dtype is not None),
        cudnn.flags(
            enabled=cudnn.enabled,
            benchmark=cudnn.benchmark,
            deterministic=cudnn.deterministic,
            allow_tf32=False,
        ),
    ):
        yield
