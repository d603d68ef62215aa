"""An encoder as torch.export traces it: any batch, one size of images, batch norms folded."""

import copy
from typing import Any

import torch
from torch import nn

from mimkit.models.calibration import batch_norms
from mimkit.models.encoder import ImageEncoder

_BATCH = 2  # of the traced example; 1 would be taken for a constant


def traced(encoder: ImageEncoder) -> Any:
    """torch's ExportedProgram: image_BCHW -> tokens, positions baked at the encoder's size."""
    model = _Tokens(encoder).eval()
    rows, columns = encoder.encoder.grid
    patch = encoder.stem.patch_size
    example = torch.zeros(_BATCH, 3, rows * patch, columns * patch)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        return torch.export.export(model, (example,), dynamic_shapes=({0: batch},))


class _Tokens(nn.Module):
    """The encoder without what only training needs."""

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__()
        self.stem = encoder.stem.folded() if batch_norms(encoder.stem) else encoder.stem
        self.encoder = copy.deepcopy(encoder.encoder)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        tokens_BND: torch.Tensor = self.encoder(self.stem(image))
        return tokens_BND
