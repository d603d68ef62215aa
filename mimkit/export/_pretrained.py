"""A trained encoder for anybody's code: a plain module that knows its own preprocessing."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE
from torch import Tensor, nn, uint8

from mimkit import __version__
from mimkit.batch import Grid, normalise
from mimkit.errors import UserError
from mimkit.export._images import check_channels, check_images, check_range, check_sides
from mimkit.export._names import check_equal_names
from mimkit.export._recipe import encoder_recipe, rebuilt, stem_recipe
from mimkit.export._tensors import read_tensors, write_tensors
from mimkit.models.encoder import ImageEncoder
from mimkit.models.resize import resized

FORMAT = "mimkit.encoder.1"


class Normalisation(NamedTuple):
    """What an encoder expects of pixels: (x - mean) / std a channel, x in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image_BCHW: Tensor) -> Tensor:
        """Of uint8 (0..255), or of floats in [0, 1]; one image (3, H, W) or a batch of them.

        Raises:
            UserError: another type, number of channels or range, or NaN.
        """
        check_channels(image_BCHW)
        if image_BCHW.dtype != uint8:
            check_range(image_BCHW)
            image_BCHW = image_BCHW.float() * 255
        return normalise(image_BCHW, mean=self.mean, std=self.std)


class PretrainedEncoder(
    nn.Module, PyTorchModelHubMixin, library_name="mimkit", pipeline_tag="image-feature-extraction"
):
    """normalised image_BCHW of any size that is a multiple of the patch -> features.

    At another size than its own, positions are interpolated for the call (`mimkit.models.resize`);
    `load_encoder(path, image_size=...)` does that once. Images of another shape or type raise
    UserError, a ValueError that says what is expected; their values are not looked at.

    Attributes:
        normalisation: mean and std; call it on uint8 images, or on floats in [0, 1].
        about: what the run said of itself: metrics, the tokenizer's hash, licence, ...
    """

    def __init__(
        self, model: ImageEncoder, *, normalisation: Normalisation, about: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.stem, self.encoder = model.stem, model.encoder
        self.normalisation, self.about = normalisation, dict(about)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """One feature an image, (B, D): the mean of its patch tokens after the final norm."""
        return self.forward_features(image_BCHW)[:, 1:].mean(1)

    def forward_features(self, image_BCHW: Tensor) -> Tensor:
        """Every token after the final norm, (B, 1 + N, D): the class token, then row by row."""
        tokens_BND: Tensor = self._sized(image_BCHW)(image_BCHW)
        return tokens_BND

    def intermediates(self, image_BCHW: Tensor, blocks: Sequence[int]) -> list[Tensor]:
        """Tokens (B, 1 + N, D) after each of the given blocks, which count from 1.

        The norm that follows the last block is `encoder.norm`; these are before it.
        """
        return self._sized(image_BCHW).intermediates(image_BCHW, blocks)

    def grid(self, height: int, width: int) -> Grid:
        """Rows and columns of patch tokens for an image of this size in pixels."""
        check_sides(height, width, patch=self.stem.patch_size, what="an image is of")
        return self.stem.grid(height, width)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width whose positions are stored; others are interpolated from them."""
        rows, columns = self.encoder.grid
        return rows * self.stem.patch_size, columns * self.stem.patch_size

    @property
    def image_encoder(self) -> ImageEncoder:
        """The stem and the encoder, sharing their weights with this model."""
        return ImageEncoder(self.stem, self.encoder)

    def _sized(self, image_BCHW: Tensor) -> ImageEncoder:
        dtype = self.encoder.cls_token.dtype
        check_images(image_BCHW, patch=self.stem.patch_size, dtype=dtype)
        height, width = image_BCHW.shape[-2:]
        return resized(self.image_encoder, self.grid(height, width))

    def _save_pretrained(self, save_directory: Path) -> None:
        save_encoder(save_directory / SAFETENSORS_SINGLE_FILE, self.image_encoder,
                     normalisation=self.normalisation, about=self.about)  # fmt: skip
        recipe = {"stem": stem_recipe(self.stem), "encoder": encoder_recipe(self.encoder)}
        (save_directory / "config.json").write_text(json.dumps(recipe, indent=2), encoding="utf-8")

    @classmethod
    def _from_pretrained(  # type: ignore[override]  # the mixin's takes anything
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
    ) -> "PretrainedEncoder":
        """The mixin's own would match weights loosely, and fall back to pickles."""
        path = Path(model_id) / SAFETENSORS_SINGLE_FILE
        if not Path(model_id).is_dir():
            found = hf_hub_download(model_id, SAFETENSORS_SINGLE_FILE, revision=revision,
                                    cache_dir=cache_dir, force_download=force_download,
                                    local_files_only=local_files_only, token=token)  # fmt: skip
            path = Path(found)
        return read_encoder(path)


def save_encoder(
    path: Path, model: ImageEncoder, *, normalisation: Normalisation, about: Mapping[str, str]
) -> None:
    """One safetensors file: weights under our names, and in its metadata how to rebuild them."""
    rows, columns = model.encoder.grid
    patch = model.stem.patch_size
    metadata = {
        "mimkit_format": FORMAT,
        "mimkit_version": __version__,
        "stem": json.dumps(stem_recipe(model.stem)),
        "encoder": json.dumps(encoder_recipe(model.encoder)),
        "image_size": json.dumps([rows * patch, columns * patch]),
        "mean": json.dumps(normalisation.mean),
        "std": json.dumps(normalisation.std),
    }
    write_tensors(path, model.state_dict(), metadata={**about, **metadata})


def read_encoder(path: Path) -> PretrainedEncoder:
    """A file of `save_encoder` in eval mode.

    Raises:
        UserError: it is no safetensors file, not ours, of a newer mimkit, or weights do not fit.
    """
    metadata, weights = read_tensors(path)
    _check_format(path, metadata)
    model = rebuilt(stem=json.loads(metadata["stem"]), encoder=json.loads(metadata["encoder"]))
    try:
        check_equal_names(weights, model.state_dict())
    except ValueError as error:
        raise UserError(f"{path}: {error}; the file is damaged, export it again") from error
    model.load_state_dict(weights)
    pixels = Normalisation(*(tuple(json.loads(metadata[name])) for name in ("mean", "std")))
    about = {name: value for name, value in metadata.items() if name not in _STRUCTURE}
    return PretrainedEncoder(model, normalisation=pixels, about=about).eval()


# What of the metadata the module says itself.
_STRUCTURE = ("format", "mimkit_format", "mimkit_version", "stem", "encoder", "image_size", "mean",
              "std")  # fmt: skip


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    found = metadata.get("mimkit_format", metadata.get("format"))
    if found == FORMAT:
        return
    if str(found).startswith("mimkit.encoder."):
        raise UserError(
            f"{path} was written by mimkit {metadata.get('mimkit_version')} in the format "
            f"{found}; this is mimkit {__version__} and reads {FORMAT}. Use that version of mimkit"
        )
    raise UserError(
        f"{path} says its format is '{found}', expected '{FORMAT}': it is for another library. "
        "Give a run folder, a checkpoint, or a file written by `mimkit export RUN --format "
        "safetensors OUT`; `mimkit import_weights` makes one of this if its stem is linear"
    )
