"""Small encoders in files of `mimkit export`, for tests of tokenizers that have a teacher."""

from pathlib import Path
from typing import Any

import torch

from mimkit.export import EXPORTERS
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.stems import STEMS


def export_encoder(path: Path, *, stem: str = "linear", **settings: Any) -> Path:
    """Width 32, two blocks, 4 x 4 patches of 8 pixels; pixels were normalised by .4 and .2."""
    encoder = Encoder(width=32, heads=4, depth=2, grid=(4, 4), **settings)
    model = ImageEncoder(STEMS[stem](width=32, patch_size=8), encoder)
    initialise(model, seed=0)
    EXPORTERS["timm"]().export(
        model, path, image_BCHW=torch.rand(2, 3, 32, 32), mean=(0.4,) * 3, std=(0.2,) * 3,
        metadata={},
    )  # fmt: skip
    return path
