"""Encoders out of run folders and files."""

import logging
import re
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimkit import __version__, build
from mimkit.batch import normalise
from mimkit.config import Config, DataConfig, load_config
from mimkit.data.loader import eval_loader
from mimkit.encoder_card import about_run, read_json
from mimkit.errors import UserError
from mimkit.export._images import check_sides
from mimkit.export._pretrained import Normalisation, PretrainedEncoder, read_encoder
from mimkit.importing import import_weights
from mimkit.models.encoder import ImageEncoder
from mimkit.models.mim import MaskedImageModel
from mimkit.models.resize import resized
from mimkit.train import checkpoint

_LOG = logging.getLogger(__name__)
Size = int | tuple[int, int]  # pixels: of a square, or height and width


def load_encoder(path: str | Path, *, image_size: Size | None = None) -> PretrainedEncoder:
    """A trained encoder as a plain module, in eval mode on the CPU; no configuration is needed.

    Args:
        path: a run folder (of a finetuning: its best weights), a checkpoint of a pretraining, a
            file of `mimkit export --format safetensors`, a file of somebody else's that `mimkit
            import_weights` reads (what it found is logged), or a folder that holds such a file as
            model.safetensors.
        image_size: pixels for which positions are interpolated once; any multiple of the patch.
            Without it the encoder takes images of any such size too, and interpolates every time.

    Raises:
        UserError: it is none of these, is damaged, or a newer mimkit wrote it. Pickles are never
            read.
    """
    encoder = _read(existing(Path(path)))
    if image_size is None:
        return encoder
    model = at_size(encoder.image_encoder, image_size, what="image_size is")
    return PretrainedEncoder(model, normalisation=encoder.normalisation, about=encoder.about).eval()


def existing(path: Path) -> Path:
    """`path`; UserError where there is nothing."""
    if not path.exists():
        raise UserError(f"there is no {path}; give a run folder, a checkpoint or an exported file")
    return path


def _read(path: Path) -> PretrainedEncoder:
    if (file := encoder_file(path)) is not None:
        return _import(path) if is_foreign(file) else read_encoder(file)
    config, encoder, newest = load_run(path)
    pixels = Normalisation(config.data.mean, config.data.std)
    about = about_run(config, newest)
    return PretrainedEncoder(encoder, normalisation=pixels, about=about).eval()


def encoder_file(path: Path) -> Path | None:
    """The file itself, or the one in a folder of an export; None for a run or a checkpoint.

    Of a finetuning's run folder it is that of its best weights.
    """
    if path.is_file():
        return path
    folder = path / "best" if (path / "best").is_dir() else path
    if (folder / "delta.safetensors").exists():
        raise UserError(
            f"{folder} holds only what finetuning changed of an encoder; put both together first: "
            f"mimkit merge {folder} INIT OUT"
        )
    file = folder / "model.safetensors"
    return file if file.exists() and not (folder / "state.json").exists() else None


def is_foreign(file: Path) -> bool:
    """Whether it is sound safetensors without mimkit's metadata, or a .pth by its name.

    What mimkit wrote for transformers' own classes counts as foreign: it has their names.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            return "mimkit_format" not in (opened.metadata() or {})
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

    Where the run keeps an average of its weights (train.ema), it is the encoder of the average.

    Args:
        run: a run folder, or one of its checkpoints.

    Raises:
        UserError: it is no run, has no checkpoint, the checkpoint does not fit, or a newer mimkit
            wrote it.
    """
    config, model, newest = load_model(run)
    return config, model.image_encoder.eval(), newest


def load_model(
    run: Path, *, which: checkpoint.Which = "best"
) -> tuple[Config, MaskedImageModel, Path]:
    """As `load_run`, with the head and the mask token, of the weights asked for."""
    folder = run.parent.parent if (existing(run) / "state.json").exists() else run
    if not (folder / "config.yaml").exists():
        raise UserError(
            f"{run} is no run folder: it has no config.yaml. Give the folder that "
            "tools/pretrain.py named, for example runs/latest"
        )
    if "init" in settings_of(folder):
        raise UserError(
            f"{folder} is a finetuning; only its best weights are opened as an encoder, in "
            f"{folder / 'best'}, once it has judged some"
        )
    newest = run if folder != run else checkpoint.latest(folder / "checkpoints")
    if newest is None:
        raise UserError(
            f"{folder} has no checkpoint yet; it writes one every output.checkpoint_every updates"
        )
    _refuse_newer(folder)
    config = load_config(folder / "config.yaml")
    weights = checkpoint.load(newest).chosen(which)
    model = build.build_model(config, prediction_dim=len(weights["head.bias"]))
    model.load_state_dict(dict(weights))
    return config, model.eval(), newest


def settings_of(folder: Path) -> dict[str, Any]:
    """A run's config.yaml as it is written, of any kind of run; a finetuning's has `init`."""
    settings: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return settings


def _refuse_newer(folder: Path) -> None:
    wrote = str(read_json(folder / "run.json").get("mimkit", __version__))
    if _numbers(wrote) > _numbers(__version__):
        raise UserError(
            f"{folder} was written by mimkit {wrote}, this is mimkit {__version__}, which may not "
            "know all that is in it; install that version or a newer one"
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def sides_of(image_size: Size) -> tuple[int, int]:
    """Height and width."""
    return (image_size, image_size) if isinstance(image_size, int) else image_size


def at_size(encoder: ImageEncoder, image_size: Size, *, what: str) -> ImageEncoder:
    """With positions for images of this size; a UserError begins with `what`."""
    height, width = sides_of(image_size)
    check_sides(height, width, patch=encoder.stem.patch_size, what=what)
    return resized(encoder, encoder.stem.grid(height, width))


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
