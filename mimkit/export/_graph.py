"""An encoder as torch.export traces it: any batch, one size of images, batch norms folded."""

import copy
from typing import Any

import torch
from torch import nn

from mimkit.export._headed import EncoderWithClassifier
from mimkit.models.attention import Attention
from mimkit.models.calibration import batch_norms
from mimkit.models.encoder import ImageEncoder

_BATCH = 2  # of the traced example; 1 would be taken for a constant


def traced(encoder: ImageEncoder) -> Any:
    """torch's ExportedProgram: image_BCHW -> tokens, positions baked at the encoder's size.

    A classifier's gives logits.
    """
    model = _Output(encoder).eval()
    rows, columns = encoder.encoder.grid
    patch = encoder.stem.patch_size
    example = torch.zeros(_BATCH, 3, rows * patch, columns * patch)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        return torch.export.export(model, (example,), dynamic_shapes=({0: batch},))


def output_name(encoder: ImageEncoder) -> str:
    return "logits" if isinstance(encoder, EncoderWithClassifier) else "tokens"


class _Output(nn.Module):
    """The encoder, or the classifier, without what only training needs."""

    def __init__(self, model: ImageEncoder) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        for module in self.model.encoder.modules():
            if isinstance(module, Attention):
                _join_biases(module)
        if batch_norms(model.stem):
            self.model.stem = model.stem.folded()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if isinstance(self.model, EncoderWithClassifier):
            return self.model.logits(image)
        tokens_BND: torch.Tensor = self.model(image)
        return tokens_BND


def _join_biases(attention: Attention) -> None:
    """BEiT's two as one: three nodes a block less to trace, translate and run."""
    joined = attention.qkv_bias()
    if joined is not None:
        attention.qkv.bias = nn.Parameter(joined.detach())
        attention.q_bias = attention.v_bias = None
