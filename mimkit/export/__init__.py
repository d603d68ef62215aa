"""Exporters write an encoder for another library and prove it. Contract, and the registry."""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimkit.errors import UserError
from mimkit.export._headed import EncoderWithHead
from mimkit.export._optional import optional
from mimkit.export._proof import Comparison, Proof, compared, latency
from mimkit.files import atomic_file, atomic_folder, sha256, write_text
from mimkit.models.encoder import ImageEncoder
from mimkit.models.resize import resized
from mimkit.registry import Registry

Call = Callable[[Tensor], Tensor]
_FEW = 1  # images at other sizes and in bfloat16: ViT-B takes half a second for one


@dataclass(frozen=True)
class ExportReport(Proof):
    """What was written, with its proof."""

    path: Path
    architecture: str  # the class that holds it
    library: str  # whose class that is
    usage: str  # Python lines that load it
    parameters: int
    files: Mapping[str, str]  # name -> sha256
    bytes: int


class Exporter(ABC):
    """Writes a file or folder, loads it back, runs both on the same images, refuses a difference.

    Attributes:
        library: whose model it becomes, by HuggingFace's name.
        tolerance: largest difference of any output, float32.
        is_folder: whether OUT is a folder.
        holds_head: whether the mask token and the head of pretraining can go with the encoder.
        casts: whether the loaded model can be cast to bfloat16.
        packages: what it needs besides mimkit's own dependencies, from mimkit[export].
    """

    library = "mimkit"
    tolerance = 1e-5
    is_folder = False
    holds_head = False
    casts = True
    packages: Sequence[str] = ()

    @abstractmethod
    def architecture(self, encoder: ImageEncoder) -> str:
        """The class that will hold it; UserError with the reason and with a format that can."""

    @abstractmethod
    def write(self, encoder: ImageEncoder, path: Path, *, metadata: Mapping[str, str]) -> None:
        """The encoder in this format; `path` is an empty folder where `is_folder`."""

    @abstractmethod
    def load(self, path: Path) -> nn.Module:
        """The export as a model of the format's own library, in eval mode, from it alone."""

    @abstractmethod
    def tokens(self, loaded: nn.Module, image_BCHW: Tensor) -> Tensor:
        """What the loaded model gives for normalised images: (B, 1 + N, D), class token first."""

    @abstractmethod
    def usage(self, encoder: ImageEncoder, path: Path) -> str:
        """Python lines for the card, run beside the export: they make `tokens` of `images`."""

    def at_size(self, loaded: nn.Module, height: int, width: int) -> nn.Module | None:
        """The loaded model for images of another size; None where positions are baked."""
        return None

    def beside(self, encoder: ImageEncoder) -> Mapping[str, str]:
        """Text files that belong to the export: name -> content."""
        return {}

    def predictions(self, loaded: nn.Module, image_BCHW: Tensor, mask_BN: Tensor) -> Tensor:
        """Of a model with its head, predicted_MV at the masked patches."""
        raise AssertionError("a format that holds heads says how they predict")

    def export(
        self,
        encoder: ImageEncoder,
        path: Path,
        *,
        image_BCHW: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        metadata: Mapping[str, str],
        fold: bool = False,
        card: Callable[[ExportReport], str] | None = None,
    ) -> ExportReport:
        """Writes `path` atomically, after what was loaded back has given the same tokens.

        Args:
            encoder: left as it is; a copy in float32, in eval mode, on the CPU is exported.
            image_BCHW: images to compare on, normalised by `mean` and `std`.
            mean: of each channel, in [0, 1]; with `std` written into the export for its users.
            metadata: what the export should say besides.
            fold: put the stem's batch norms into its convolutions; compared with the encoder as it
                was before.
            card: the model card's text, written as README.md into a folder or as PATH.md beside a
                file.

        Raises:
            UserError: the format cannot hold the encoder, or outputs differ by more than
                `tolerance`; nothing is left behind.
        """
        for package in self.packages:
            optional(package)
        if not self.is_folder:
            _check_file(path, has_card=card is not None)
        source = copy.deepcopy(encoder).float().cpu().eval()
        written = _folded(source) if fold else source
        self._check_head(written)
        architecture = self.architecture(written)
        image_size = [side * source.stem.patch_size for side in source.encoder.grid]
        pixels = {"image_size": image_size, "mean": list(mean), "std": list(std)}
        said = {**metadata, **{name: json.dumps(value) for name, value in pixels.items()}}
        with self._place(path) as temporary:
            self.write(written, temporary, metadata=said)
            proof = self._proof(source, self.load(temporary), image_BCHW.float().cpu())
            _check(proof, path)
            texts = self.beside(written)
            for name, text in texts.items():
                write_text((temporary if self.is_folder else path.parent) / name, text)
            report = ExportReport(
                **vars(proof),
                path=path,
                architecture=architecture,
                library=self.library,
                usage=self.usage(written, path),
                parameters=sum(parameter.numel() for parameter in written.parameters()),
                files=_hashes(temporary, path, texts),
                bytes=_size(temporary),
            )
            if card is not None:
                readme = temporary / "README.md" if self.is_folder else card_path(path)
                write_text(readme, card(report))
        return report

    def _place(self, path: Path) -> AbstractContextManager[Path]:
        if not self.is_folder:
            return atomic_file(path)
        if path.exists():
            raise UserError(
                f"{path} exists, and this format writes a whole folder; remove it, or name another"
            )
        return atomic_folder(path)

    def _check_head(self, encoder: ImageEncoder) -> None:
        if isinstance(encoder, EncoderWithHead) and not self.holds_head:
            raise UserError(
                "this format holds encoders only; leave --with-head out, or take --format hf, "
                "whose BeitForMaskedImageModeling has the mask token and the head"
            )

    def _proof(self, source: ImageEncoder, loaded: nn.Module, image_BCHW: Tensor) -> Proof:
        """Casts the loaded model to bfloat16 in the end: it is not used any more."""
        return Proof(
            comparisons=list(self._comparisons(source, loaded, image_BCHW)),
            tolerance=self.tolerance,
            latency=latency(*self._calls(source, loaded), image_BCHW[:1]),
            bf16_difference=self._in_bf16(source, loaded, image_BCHW[:_FEW]),
        )

    def _calls(self, source: ImageEncoder, loaded: nn.Module) -> tuple[Call, Call]:
        """What is compared: tokens, or predictions where there is a head."""
        if not isinstance(source, EncoderWithHead):
            return source, lambda image_BCHW: self.tokens(loaded, image_BCHW)
        mask = source.example_mask
        return (
            lambda image_BCHW: source.predictions(image_BCHW, mask(len(image_BCHW))),
            lambda image_BCHW: self.predictions(loaded, image_BCHW, mask(len(image_BCHW))),
        )

    @torch.no_grad()
    def _comparisons(
        self, source: ImageEncoder, loaded: nn.Module, image_BCHW: Tensor
    ) -> Iterator[Comparison]:
        """At the encoder's own size, then at a larger and a smaller one that are not square."""
        ours, theirs = self._calls(source, loaded)
        yield compared(ours(image_BCHW), theirs(image_BCHW), image_BCHW)
        if isinstance(source, EncoderWithHead):
            return
        rows, columns = source.encoder.grid
        for grid in ((rows + max(1, rows // 2), columns), (max(1, rows // 2), columns + 1)):
            height, width = (side * source.stem.patch_size for side in grid)
            model = self.at_size(loaded, height, width)
            if model is None:
                continue
            images = functional.interpolate(image_BCHW[:_FEW], (height, width), mode="bilinear")
            yield compared(resized(source, grid)(images), self.tokens(model, images), images)

    @torch.no_grad()
    def _in_bf16(self, source: ImageEncoder, loaded: nn.Module, image_BCHW: Tensor) -> float | None:
        if not self.casts or isinstance(source, EncoderWithHead):
            return None
        got = self.tokens(loaded.bfloat16(), image_BCHW.bfloat16())
        return compared(source(image_BCHW), got.float(), image_BCHW).max_difference


EXPORTERS: Registry[Callable[..., Exporter]] = Registry("export format", __name__)


def card_path(path: Path) -> Path:
    """Where the card of a file lies: beside it."""
    return path.with_name(f"{path.name}.md")


_CARD_MARK = b"written by mimkit"  # stands in every card


def _check_file(path: Path, *, has_card: bool) -> None:
    """UserError where a folder or somebody's own text would be in the way, before any work."""
    if path.is_dir():
        raise UserError(f"{path} is a folder, and this format writes a file; name another")
    note = card_path(path)
    if has_card and note.exists() and not (note.is_file() and _CARD_MARK in note.read_bytes()):
        raise UserError(
            f"{note} is no model card of mimkit's, and the card would replace it; move it, or name "
            "another file"
        )


def _folded(source: ImageEncoder) -> ImageEncoder:
    """A copy whose stem is folded; the rest is shared."""
    twin = copy.copy(source)
    twin._modules = dict(source._modules)
    twin.stem = source.stem.folded()
    return twin


def _check(proof: Proof, path: Path) -> None:
    for found in proof.comparisons:
        if found.shapes_differ is not None:
            raise UserError(f"{found.shapes_differ}; {path} was not written")
        if not found.max_difference <= proof.tolerance:  # also refuses NaN
            raise UserError(
                f"the model loaded back differs from the encoder by {found.max_difference:.2g} on "
                f"the example images of {found.height}x{found.width}, more than "
                f"{proof.tolerance:g}; {path} was not written"
            )


def _hashes(temporary: Path, path: Path, texts: Mapping[str, str]) -> dict[str, str]:
    if temporary.is_dir():
        return {file.name: sha256(file) for file in sorted(temporary.iterdir())}
    return {path.name: sha256(temporary), **{n: sha256(path.parent / n) for n in texts}}


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
