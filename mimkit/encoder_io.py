"""Encoders out of run folders, and into other libraries' files."""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from mimkit import __version__, build
from mimkit.batch import normalise
from mimkit.config import Config, DataConfig, load_config
from mimkit.data.loader import eval_loader
from mimkit.encoder_card import about_run, card_facts, read_json
from mimkit.errors import UserError
from mimkit.export import EXPORTERS, ExportReport
from mimkit.export._card import model_card
from mimkit.export._headed import EncoderWithHead
from mimkit.export._pretrained import Normalisation, PretrainedEncoder, read_encoder
from mimkit.importing import import_weights
from mimkit.models.encoder import ImageEncoder
from mimkit.models.mim import MaskedImageModel
from mimkit.models.regroup import Movement, movement, regroup
from mimkit.models.resize import resized
from mimkit.train import checkpoint

_LOG = logging.getLogger(__name__)
Size = int | tuple[int, int]  # pixels: of a square, or height and width


@dataclass(frozen=True)
class RunExport:
    """The proof of the file, and how far a regrouped encoder's tokens moved (else empty)."""

    report: ExportReport
    moved: Sequence[Movement] = ()


def load_encoder(path: str | Path, *, image_size: Size | None = None) -> PretrainedEncoder:
    """A trained encoder as a plain module, in eval mode on the CPU; no configuration is needed.

    Args:
        path: a run folder, one of its checkpoints, a file of `mimkit export --format safetensors`,
            a file of somebody else's that `mimkit import_weights` reads (what it found is logged),
            or a folder that holds such a file as model.safetensors.
        image_size: pixels for which positions are interpolated once; any multiple of the patch.
            Without it the encoder takes images of any such size too, and interpolates every time.

    Raises:
        UserError: it is none of these, is damaged, or a newer mimkit wrote it. Pickles are never
            read.
    """
    if not Path(path).exists():
        raise UserError(f"there is no {path}; give a run folder, a checkpoint or an exported file")
    encoder = _read(Path(path))
    if image_size is None:
        return encoder
    model = _at_size(encoder.image_encoder, image_size)
    return PretrainedEncoder(model, normalisation=encoder.normalisation, about=encoder.about).eval()


def _read(path: Path) -> PretrainedEncoder:
    if path.is_file() or _is_exported(path):
        file = path if path.is_file() else path / "model.safetensors"
        return _import(path) if _is_foreign(file) else read_encoder(file)
    config, encoder, newest = load_run(path)
    pixels = Normalisation(config.data.mean, config.data.std)
    about = about_run(config, newest)
    return PretrainedEncoder(encoder, normalisation=pixels, about=about).eval()


def _is_exported(folder: Path) -> bool:
    return (folder / "model.safetensors").exists() and not (folder / "state.json").exists()


def _is_foreign(file: Path) -> bool:
    """Whether it is sound safetensors without mimkit's metadata, or a .pth by its name."""
    try:
        with safe_open(file, framework="pt") as opened:
            return not any(key.startswith("mimkit") for key in opened.metadata() or {})
    except (OSError, SafetensorError):
        return file.suffix == ".pth"


def _import(path: Path) -> PretrainedEncoder:
    found = import_weights(path)
    share = found.coverage.share
    _LOG.warning("%s: names of '%s', %.1f %% of the weights used, mean %s, std %s (%s)", path,
                 found.scheme, 100 * share, found.mean, found.std,
                 "the scheme's default; another: mimkit import_weights --mean --std")  # fmt: skip
    about = {"imported_from": path.name, "scheme": found.scheme, "coverage": f"{share:.4f}"}
    pixels = Normalisation(found.mean, found.std)
    return PretrainedEncoder(found.encoder, normalisation=pixels, about=about).eval()


def load_run(run: Path) -> tuple[Config, ImageEncoder, Path]:
    """The configuration of a pretraining run, its newest encoder in eval mode, its checkpoint.

    Args:
        run: a run folder, or one of its checkpoints.

    Raises:
        UserError: it is no run, has no checkpoint, the checkpoint does not fit, or a newer mimkit
            wrote it.
    """
    config, model, newest = _load_model(run)
    return config, model.image_encoder.eval(), newest


def _load_model(run: Path) -> tuple[Config, MaskedImageModel, Path]:
    folder = run.parent.parent if (run / "state.json").exists() else run
    if not (folder / "config.yaml").exists():
        raise UserError(
            f"{run} is no run folder: it has no config.yaml. Give the folder that "
            "tools/pretrain.py named, for example runs/latest"
        )
    newest = run if folder != run else checkpoint.latest(folder / "checkpoints")
    if newest is None:
        raise UserError(
            f"{folder} has no checkpoint yet; it writes one every output.checkpoint_every updates"
        )
    _refuse_newer(folder)
    config = load_config(folder / "config.yaml")
    weights = checkpoint.load(newest).weights
    model = build.build_model(config, prediction_dim=len(weights["head.bias"]))
    model.load_state_dict(dict(weights))
    return config, model.eval(), newest


def _refuse_newer(folder: Path) -> None:
    wrote = str(read_json(folder / "run.json").get("mimkit", __version__))
    if _numbers(wrote) > _numbers(__version__):
        raise UserError(
            f"{folder} was written by mimkit {wrote}, this is mimkit {__version__}, which may not "
            "know all that is in it; install that version or a newer one"
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def export_run(
    run: Path,
    *,
    format_name: str,
    out: Path,
    branches: int | None = None,
    image_size: Size | None = None,
    fold: bool = False,
    with_head: bool = False,
    licence: str = "unknown",
    num_images: int = 4,
) -> RunExport:
    """Writes the run's encoder as `out`, with its card, and proves that it gives the same tokens.

    The proof runs on held-out images of the run where they can be read, else on the embedded ones.

    Args:
        branches: regroup a sequential encoder into blocks of so many branches, which moves its
            tokens; how far, on the images of the proof, is returned and written into the file.
        image_size: interpolate positions to this size first; the proof is about the encoder at it.
        fold: put the stem's batch norms into its convolutions.
        with_head: the mask token and the head too, where the format holds them.
        licence: of the weights, for the card: an identifier of HuggingFace's.
    """
    exporter = EXPORTERS[format_name]()
    config, model, newest = _load_model(run)
    encoder = _with_head(model, config) if with_head else model.image_encoder.eval()
    about = {"licence": licence, **about_run(config, newest)}
    image_BCHW = example_images(config.data, num=num_images)
    moved = list[Movement]()
    if branches is not None:
        sequential, encoder = encoder, regroup(encoder, branches=branches)
        moved = movement(sequential, encoder, image_BCHW)
        about["regrouped"] = _regrouped(branches, moved, images=len(image_BCHW))
    if image_size is not None:
        about["positions_from"] = json.dumps([config.data.image_size] * 2)
        encoder = _at_size(encoder, image_size)
        image_BCHW = functional.interpolate(image_BCHW, _sides(image_size), mode="bilinear")
    facts = card_facts(config, newest, encoder, about)
    report = exporter.export(
        encoder,
        out,
        image_BCHW=image_BCHW,
        mean=config.data.mean,
        std=config.data.std,
        metadata=about,
        fold=fold,
        card=partial(model_card, facts),
    )
    return RunExport(report, moved)


def _with_head(model: MaskedImageModel, config: Config) -> EncoderWithHead:
    if config.mask_at.name != "after_stem":
        raise UserError(
            f"the run has mask_at={config.mask_at.name}, but --with-head is for models that put "
            "the mask token in after the stem; leave --with-head out"
        )
    return EncoderWithHead(model).eval()


def _sides(image_size: Size) -> tuple[int, int]:
    return (image_size, image_size) if isinstance(image_size, int) else image_size


def _at_size(encoder: ImageEncoder, image_size: Size) -> ImageEncoder:
    return resized(encoder, encoder.stem.grid(*_sides(image_size)))


def _regrouped(branches: int, moved: Sequence[Movement], *, images: int) -> str:
    rows = [row._asdict() for row in moved]
    return json.dumps({"branches": branches, "images": images, "moved": rows})


def example_images(data: DataConfig, *, num: int) -> Tensor:
    """image_BCHW, normalised: the first held-out images, else embedded photographs."""
    embedded = data.model_copy(update={"source": "shards"})
    for settings, which in ((data, data.heldout), (embedded, "embedded")):
        if which is None:
            continue
        try:
            source = build.build_source(settings, which, split="heldout")
        except UserError:
            if which == "embedded":
                raise
            continue  # the images of a run may lie on another machine
        batches = eval_loader(
            source=source, view=build.build_probe_view(data), mask=None, seed=0,
            batch_size=num, rank=0, world=1, workers=0, limit=num,
        )  # fmt: skip
        images = next(iter(batches)).patch_view_BCHW
        return normalise(images, mean=data.mean, std=data.std)
    raise AssertionError("the embedded images are always there")
