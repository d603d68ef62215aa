"""safetensors for mimkit itself: `mimkit.load_encoder(path)` needs nothing but the file.

The metadata hold what else is needed: stem, sizes, grid, normalisation, and what the run said of
itself (metrics, the tokenizer's hash, licence).
"""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from mimkit.export import EXPORTERS, Exporter
from mimkit.export._pretrained import Normalisation, PretrainedEncoder, read_encoder, save_encoder
from mimkit.models.encoder import ImageEncoder


@EXPORTERS.register
class Safetensors(Exporter):
    """Holds every encoder, and runs at every size."""

    holds_classifier = False

    def architecture(self, encoder: ImageEncoder) -> str:
        return PretrainedEncoder.__name__

    def write(self, encoder: ImageEncoder, path: Path, *, metadata: Mapping[str, str]) -> None:
        mean, std = (tuple(json.loads(metadata[name])) for name in ("mean", "std"))
        save_encoder(path, encoder, normalisation=Normalisation(mean, std), about=metadata)

    def load(self, path: Path) -> nn.Module:
        return read_encoder(path)

    def tokens(self, loaded: nn.Module, image_BCHW: Tensor) -> Tensor:
        assert isinstance(loaded, PretrainedEncoder)
        return loaded.forward_features(image_BCHW)

    def at_size(self, loaded: nn.Module, height: int, width: int) -> nn.Module | None:
        return loaded

    def usage(self, encoder: ImageEncoder, path: Path) -> str:
        return (
            "import mimkit\n"
            f'encoder = mimkit.load_encoder("{path.name}")\n'
            "tokens = encoder.forward_features(images)  # (B, 1 + N, D)"
        )
