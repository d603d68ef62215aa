"""Exporters write an encoder for another library and prove it. Contract, and the registry."""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimkit.errors import UserError
from mimkit.export._headed import EncoderWithClassifier, EncoderWithHead
from mimkit.export._optional import optional
from mimkit.export._place import (
    card_path,
    check_file,
    check_folder,
    check_texts,
    is_card,
    placed,
)
from mimkit.export._proof import Comparison, Proof, compared, latency
from mimkit.files import sha256, write_text
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
        holds_classifier: whether a finetuned classifier can.
        casts: whether the loaded model can be cast to bfloat16.
        packages: what it needs besides mimkit's own dependencies, from mimkit[export].
    """

    library = "mimkit"
    tolerance = 1e-5
    is_folder = False
    holds_head = False
    holds_classifier = True
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

    def logits(self, loaded: nn.Module, image_BCHW: Tensor) -> Tensor:
        """Of a classifier, logits_BV."""
        logits_BV: Tensor = loaded(image_BCHW)
        return logits_BV

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
        overwrite: bool = False,
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
            overwrite: replace what is at `path`; of folders only an earlier export.

        Raises:
            UserError: the format cannot hold the encoder, something is in the way, or outputs
                differ by more than `tolerance`; nothing is left behind.
        """
        self.check(path, overwrite=overwrite, has_card=card is not None)
        source = copy.deepcopy(encoder).float().cpu().eval()
        written = _folded(source) if fold else source
        self._check_head(written)
        architecture = self.architecture(written)
        texts = self.beside(written)
        check_texts(path.parent, {} if self.is_folder else texts, overwrite=overwrite)
        image_size = [side * source.stem.patch_size for side in source.encoder.grid]
        pixels = {"image_size": image_size, "mean": list(mean), "std": list(std)}
        said = {**metadata, **{name: json.dumps(value) for name, value in pixels.items()}}
        with placed(path, is_folder=self.is_folder) as temporary:
            self.write(written, temporary, metadata=said)
            proof = self._proof(source, self.load(temporary), image_BCHW.float().cpu())
            _check(proof, path)
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
        if card is None and not self.is_folder and is_card(card_path(path)):
            card_path(path).unlink()  # of the file that was replaced
        return report

    def check(self, path: Path, *, overwrite: bool, has_card: bool = True) -> None:
        """What can be said before there is an encoder: `export` does it too.

        Raises:
            UserError: a package is missing, or something is at `path` and may not be replaced.
        """
        for package in self.packages:
            optional(package)
        if self.is_folder:
            check_folder(path, overwrite=overwrite)
        else:
            check_file(path, overwrite=overwrite, has_card=has_card)

    def _check_head(self, encoder: ImageEncoder) -> None:
        if isinstance(encoder, EncoderWithHead) and not self.holds_head:
            raise UserError(
                "this format holds encoders only; leave --with-head out, or take --format hf, "
                "whose BeitForMaskedImageModeling has the mask token and the head"
            )
        if isinstance(encoder, EncoderWithClassifier) and not self.holds_classifier:
            raise UserError(
                "this format holds encoders only; leave --with-head out, or take --format timm, "
                "hf, onnx or pt2. For mimkit itself the folder `best` of the run is the "
                "classifier: mimkit.classifier_io.load_classifier"
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
        """What is compared: tokens; predictions or logits where there is a head."""
        if isinstance(source, EncoderWithClassifier):
            return source.logits, lambda image_BCHW: self.logits(loaded, image_BCHW)
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
            ours, theirs = self._calls(resized(source, grid), model)
            yield compared(ours(images), theirs(images), images)

    @torch.no_grad()
    def _in_bf16(self, source: ImageEncoder, loaded: nn.Module, image_BCHW: Tensor) -> float | None:
        if not self.casts or isinstance(source, EncoderWithHead):
            return None
        ours, theirs = self._calls(source, loaded.bfloat16())
        return compared(
            ours(image_BCHW), theirs(image_BCHW.bfloat16()).float(), image_BCHW
        ).max_difference


EXPORTERS: Registry[Callable[..., Exporter]] = Registry("export format", __name__)


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
