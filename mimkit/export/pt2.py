"""torch.export's archive: runs wherever torch does, without mimkit and without our classes.

`torch.export.load` reads pickles that can run anything: load a .pt2 only from somebody you would
take code from. mimkit never reads one but to prove what it has just written itself, and
`mimkit.load_encoder` refuses it.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mimkit.export import EXPORTERS, Exporter
from mimkit.export._graph import output_name, traced
from mimkit.export._headed import classes_said
from mimkit.models.encoder import ImageEncoder


@EXPORTERS.register
class Pt2(Exporter):
    """Any batch; positions are baked at the encoder's size, and batch norms are folded."""

    library = "pytorch"
    casts = False

    def architecture(self, encoder: ImageEncoder) -> str:
        return "ExportedProgram"

    def write(self, encoder: ImageEncoder, path: Path, *, metadata: Mapping[str, str]) -> None:
        with path.open("wb") as file:
            torch.export.save(
                traced(encoder), file, extra_files={**metadata, **classes_said(encoder)}
            )

    def load(self, path: Path) -> nn.Module:
        with path.open("rb") as file:
            loaded: nn.Module = torch.export.load(file).module()
        return loaded

    def tokens(self, loaded: nn.Module, image_BCHW: Tensor) -> Tensor:
        tokens_BND: Tensor = loaded(image_BCHW)
        return tokens_BND

    def usage(self, encoder: ImageEncoder, path: Path) -> str:
        name = output_name(encoder)
        shape = "(B, V)" if name == "logits" else "(B, 1 + N, D)"
        return (
            "import torch\n"
            f'model = torch.export.load("{path.name}").module()  # runs pickles: trust its author\n'
            f"{name} = model(images)  # {shape}"
        )
