"""Exporters write an encoder for another library and prove it. Contract, and the registry."""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.files import atomic_file
from mimkit.models.encoder import ImageEncoder
from mimkit.registry import Registry

TOLERANCE = 1e-5  # largest difference of any output, float32


@dataclass(frozen=True)
class ExportReport:
    """What was written and how it compared with the source."""

    path: Path
    parameters: int
    bytes: int
    images: int
    max_difference: float
    tolerance: float


class Exporter(ABC):
    """Writes a file, loads it back, runs both on the same images, and refuses a difference."""

    @abstractmethod
    def write(self, encoder: ImageEncoder, path: Path, *, metadata: Mapping[str, str]) -> None:
        """The encoder in this format; UserError with the reason where the format cannot hold it."""

    @abstractmethod
    def load(self, path: Path) -> nn.Module:
        """The file as a model of the format's own library, in eval mode, from the file alone."""

    @abstractmethod
    def tokens(self, loaded: nn.Module, image_BCHW: Tensor) -> Tensor:
        """What the loaded model gives for normalised images: (B, 1 + N, D), class token first."""

    def export(
        self,
        encoder: ImageEncoder,
        path: Path,
        *,
        image_BCHW: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        metadata: Mapping[str, str],
    ) -> ExportReport:
        """Writes `path` atomically, after the file loaded back has given the same tokens.

        Args:
            encoder: left as it is; a copy in float32, in eval mode, on the CPU is exported.
            image_BCHW: images to compare on, normalised by `mean` and `std`.
            mean: of each channel, in [0, 1]; with `std` written into the file for its users.
            metadata: what the file should say besides.

        Raises:
            UserError: the format cannot hold the encoder, or outputs differ by more than 1e-5;
                no file is left behind.
        """
        source = copy.deepcopy(encoder).float().cpu().eval()
        image_size = [side * source.stem.patch_size for side in source.encoder.grid]
        pixels = {"image_size": image_size, "mean": list(mean), "std": list(std)}
        said = {**metadata, **{name: json.dumps(value) for name, value in pixels.items()}}
        with atomic_file(path) as temporary:
            self.write(source, temporary, metadata=said)
            difference = self._difference(source, temporary, image_BCHW.float().cpu())
            _check(difference, path)
        return ExportReport(
            path=path,
            parameters=sum(parameter.numel() for parameter in source.parameters()),
            bytes=path.stat().st_size,
            images=len(image_BCHW),
            max_difference=difference,
            tolerance=TOLERANCE,
        )

    @torch.no_grad()
    def _difference(self, source: ImageEncoder, path: Path, image_BCHW: Tensor) -> float:
        expected = source(image_BCHW)
        got = self.tokens(self.load(path), image_BCHW)
        if got.shape != expected.shape:
            raise UserError(
                f"the exported model gives tokens of shape {tuple(got.shape)}, the encoder "
                f"{tuple(expected.shape)}; nothing was written"
            )
        return float((got - expected).abs().max())


EXPORTERS: Registry[Callable[..., Exporter]] = Registry("export format", __name__)


def _check(difference: float, path: Path) -> None:
    if not difference <= TOLERANCE:  # also refuses NaN
        raise UserError(
            f"the model loaded back differs from the encoder by {difference:.2g} on the example "
            f"images, more than {TOLERANCE:g}; {path} was not written"
        )
