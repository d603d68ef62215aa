"""Encoders of run folders, and of files that mimkit wrote, into other libraries' files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.nn import functional

from mimkit.classifier_io import finetuned_folder, load_classifier
from mimkit.config import Config, DataConfig
from mimkit.encoder_card import about_run, card_facts, file_facts
from mimkit.encoder_io import (
    Size,
    at_size,
    encoder_file,
    example_images,
    is_foreign,
    load_model,
    sides_of,
)
from mimkit.errors import UserError
from mimkit.export import EXPORTERS, ExportReport
from mimkit.export._card import CardFacts, model_card
from mimkit.export._headed import EncoderWithClassifier, EncoderWithHead
from mimkit.export._pretrained import read_encoder
from mimkit.models.encoder import ImageEncoder
from mimkit.models.mim import MaskedImageModel
from mimkit.models.regroup import Movement, movement, regroup
from mimkit.train.checkpoint import Which

Facts = Callable[[ImageEncoder, Mapping[str, str]], CardFacts]


@dataclass(frozen=True)
class RunExport:
    """The proof of the file, and how far a regrouped encoder's tokens moved (else empty)."""

    report: ExportReport
    moved: Sequence[Movement] = ()


@dataclass(frozen=True)
class _Given:
    """An encoder to export, where images for its proof are, and what it says of itself."""

    encoder: ImageEncoder
    data: DataConfig
    about: Mapping[str, str]
    facts: Facts


def export_run(
    run: Path,
    *,
    format_name: str,
    out: Path,
    branches: int | None = None,
    image_size: Size | None = None,
    fold: bool = False,
    with_head: bool = False,
    licence: str | None = None,
    num_images: int = 4,
    weights: Which = "best",
    overwrite: bool = False,
) -> RunExport:
    """Writes the run's encoder as `out`, with its card, and proves that it gives the same tokens.

    The proof runs on held-out images of the run where they can be read, else on the embedded ones.

    Args:
        run: a run folder (of a finetuning: its best weights), a checkpoint of a pretraining, or a
            file of `import_weights` or of format safetensors, or a folder with it.
        branches: regroup a sequential encoder into blocks of so many branches, which moves its
            tokens; how far, on the images of the proof, is returned and written into the file.
        image_size: interpolate positions to this size first; the proof is about the encoder at it.
        fold: put the stem's batch norms into its convolutions.
        with_head: what was trained with the encoder too, where the format holds it: of a
            pretraining the mask token and the head, of a finetuning the classifier.
        licence: of the weights, for the card: an identifier of HuggingFace's; None for what the
            file says, else "unknown".
        weights: the trained ones, their average, or the average where the run keeps one.
        overwrite: replace what is at `out`; of folders only an earlier export.
    """
    exporter = EXPORTERS[format_name]()
    exporter.check(out, overwrite=overwrite)
    given = _given(run, with_head=with_head, weights=weights)
    encoder = given.encoder
    if branches is not None and with_head:
        raise UserError(
            "--regroup makes another encoder, which the head was not trained for; leave --regroup "
            "or --with-head out"
        )
    about = {"licence": "unknown", **given.about, **({"licence": licence} if licence else {})}
    image_BCHW = _images(encoder, given.data, num=num_images)
    moved = list[Movement]()
    if branches is not None:
        sequential, encoder = encoder, regroup(encoder, branches=branches)
        moved = movement(sequential, encoder, image_BCHW)
        about["regrouped"] = _regrouped(branches, moved, images=len(image_BCHW))
    if image_size is not None:
        about["positions_from"] = json.dumps(_size_of(encoder))
        encoder = at_size(encoder, image_size, what="--image-size is")
        image_BCHW = functional.interpolate(image_BCHW, sides_of(image_size), mode="bilinear")
    report = exporter.export(
        encoder,
        out,
        image_BCHW=image_BCHW,
        mean=given.data.mean,
        std=given.data.std,
        metadata=about,
        fold=fold,
        card=partial(model_card, given.facts(encoder, about)),
        overwrite=overwrite,
    )
    return RunExport(report, moved)


def _given(path: Path, *, with_head: bool, weights: Which) -> _Given:
    file = encoder_file(path)
    if file is None:
        return _of_run(path, with_head=with_head, weights=weights)
    if is_foreign(file):
        raise UserError(
            f"{file} holds weights of somebody else's; `mimkit import_weights {path} "
            "encoder.safetensors` makes an encoder of them, which this command exports"
        )
    if weights != "best":
        raise UserError(f"{file} is one set of weights; leave --weights out, or give a run folder")
    if with_head:
        return _of_classifier(path, file)
    return _of_file(file)


def _of_run(run: Path, *, with_head: bool, weights: Which) -> _Given:
    config, model, newest = load_model(run, which=weights)
    encoder = _with_head(model, config) if with_head else model.image_encoder.eval()
    about = about_run(config, newest)
    if config.train.ema is not None and weights != "trained":
        about["weights"] = f"average over the training, decay {config.train.ema:g}"
    return _Given(encoder, config.data, about, partial(card_facts, config, newest))


def _of_file(file: Path) -> _Given:
    found = read_encoder(file)
    mean, std = found.normalisation
    data = DataConfig(image_size=max(found.image_size), mean=mean, std=std)
    facts = partial(file_facts, file, found.normalisation)
    return _Given(found.image_encoder.eval(), data, found.about, facts)


def _of_classifier(path: Path, file: Path) -> _Given:
    if finetuned_folder(path) is None:
        raise UserError(
            f"{path} is an encoder without a head; leave --with-head out, or give the folder "
            "of the run that trained it"
        )
    found = load_classifier(path)
    mean, std = found.normalisation
    data = DataConfig(image_size=max(found.image_size), mean=mean, std=std)
    encoder = EncoderWithClassifier(found.model, classes=found.classes).eval()
    return _Given(encoder, data, found.about, partial(file_facts, file, found.normalisation))


def _with_head(model: MaskedImageModel, config: Config) -> EncoderWithHead:
    if config.mask_at.name != "after_stem":
        raise UserError(
            f"the run has mask_at={config.mask_at.name}, but --with-head is for models that put "
            "the mask token in after the stem; leave --with-head out"
        )
    return EncoderWithHead(model).eval()


def _size_of(encoder: ImageEncoder) -> list[int]:
    return [side * encoder.stem.patch_size for side in encoder.encoder.grid]


def _images(encoder: ImageEncoder, data: DataConfig, *, num: int) -> Tensor:
    """Squares, in the shape of the encoder's images."""
    image_BCHW, size = example_images(data, num=num), _size_of(encoder)
    if list(image_BCHW.shape[-2:]) == size:
        return image_BCHW
    return functional.interpolate(image_BCHW, size, mode="bilinear")


def _regrouped(branches: int, moved: Sequence[Movement], *, images: int) -> str:
    rows = [row._asdict() for row in moved]
    return json.dumps({"branches": branches, "images": images, "moved": rows})
