"""What the tokenizers of DALL-E's architecture have in common: one word for 8 x 8 pixels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from mimkit.tokenizers import VisualTokenizer
from mimkit.tokenizers._dvae_model import DOWNSAMPLING

Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class WordTokenizer(VisualTokenizer):
    """Frozen; its targets are words, judged by cross-entropy."""

    patch = DOWNSAMPLING
    vocabulary: int

    def freeze(self) -> None:
        """What a part calls when its networks are in place."""
        # 1.4 times faster on CPU; the words are the same but for ties within rounding.
        self.to(memory_format=torch.channels_last)
        self.requires_grad_(False)
        self.eval()


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
