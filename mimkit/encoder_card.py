"""What a run folder says about its encoder: in the metadata of exports, and on their cards."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mimkit.config import Config
from mimkit.errors import UserError
from mimkit.export._card import CLASSIFIES, IMPORTED, PRETRAINED, CardFacts
from mimkit.export._headed import EncoderWithClassifier
from mimkit.export._pretrained import Normalisation
from mimkit.files import sha256
from mimkit.models.encoder import ImageEncoder
from mimkit.train import checkpoint


def read_json(path: Path) -> dict[str, Any]:
    """What a run says of itself; empty where it has not said it yet.

    Raises:
        UserError: it is there and damaged.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}. Put it back from a copy") from error
    return dict(found)


def about_run(config: Config, newest: Path) -> dict[str, str]:
    """What an export should say of its run, as strings; names, not paths of this machine."""
    folder = newest.parent.parent
    facts = read_json(folder / "run.json").get("facts", {})
    return {
        "mimkit_run": f"{folder.resolve().name}/{newest.name}",
        "mimkit_config": config.name,
        "tokenizer": str(facts.get("tokenizer", "not on record")),
        "metrics": json.dumps(_metrics(folder)),
    }


def _metrics(folder: Path) -> dict[str, Any]:
    """Of the finished run, what tells how good it is."""
    summary = read_json(folder / "summary.json")
    aside = ("leak_", "seconds_", "images_per_second", "steps", "substituted_samples")
    return {name: value for name, value in summary.items() if not name.startswith(aside)}


def card_facts(
    config: Config, newest: Path, encoder: ImageEncoder, about: Mapping[str, str]
) -> CardFacts:
    """The card's tables.

    Args:
        newest: the checkpoint, in its run folder.
        encoder: as it is exported, regrouped and at its size.
        about: `about_run`, the licence, and what was done to the encoder since.
    """
    folder = newest.parent.parent
    rows, columns = encoder.encoder.grid
    patch = encoder.stem.patch_size
    return CardFacts(
        name=about["mimkit_run"],
        licence=about["licence"],
        mean=config.data.mean,
        std=config.data.std,
        image_size=(rows * patch, columns * patch),
        sections={
            "Model": _model_rows(encoder, about),
            "Data": _data_rows(config, read_json(folder / "run.json").get("facts", {})),
            "Budget": _budget_rows(config, newest),
            "Metrics": _metrics(folder),
            "Audits": dict(_audit_rows(folder)),
        },
    )


def file_facts(
    file: Path, pixels: Normalisation, encoder: ImageEncoder, about: Mapping[str, str]
) -> CardFacts:
    """The card's tables of an encoder that comes out of a file instead of a run.

    Args:
        file: that `mimkit.load_encoder` reads.
        encoder: as it is exported, regrouped and at its size.
        about: what the file says of itself, and what was done to the encoder since.
    """
    rows, columns = encoder.encoder.grid
    patch = encoder.stem.patch_size
    origin = {name: about[name] for name in _ORIGIN if name in about}
    return CardFacts(
        name=about.get("mimkit_run") or about.get("imported_from") or file.name,
        licence=about["licence"],
        mean=pixels.mean,
        std=pixels.std,
        image_size=(rows * patch, columns * patch),
        sections={
            "Model": _model_rows(encoder, about),
            "Origin": {"file": file.name, "sha256 of the file": f"`{sha256(file)}`", **origin},
            "Metrics": json.loads(about.get("metrics", "{}")) or _finetuned(file),
            **_class_rows(encoder),
        },
        intended=_intended(encoder, about),
        task="image-classification" if _classifies(encoder) else "image-feature-extraction",
    )


def _intended(encoder: ImageEncoder, about: Mapping[str, str]) -> str:
    if _classifies(encoder):
        return CLASSIFIES
    return IMPORTED if "imported_from" in about else PRETRAINED


def _classifies(encoder: ImageEncoder) -> bool:
    return isinstance(encoder, EncoderWithClassifier)


def _finetuned(file: Path) -> dict[str, Any]:
    """Numbers of the finetuning in whose folder `best` the file is; empty where it is elsewhere."""
    best = read_json(file.parent / "best.json")
    numbers = _metrics(file.resolve().parents[1]) if best else {}
    return {**best, **{name: value for name, value in numbers.items()
                       if isinstance(value, int | float)}}  # fmt: skip


def _class_rows(encoder: ImageEncoder) -> dict[str, dict[str, object]]:
    if not isinstance(encoder, EncoderWithClassifier):
        return {}
    names = encoder.classes
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN))
    return {"Classes": {"number": encoder.num_classes, "names": shown or "not on record",
                        "pooling": encoder.pooling}}  # fmt: skip


_SHOWN = 20  # names of classes
_ORIGIN = (
    "mimkit_run",
    "update",
    "init",
    "mimkit_config",
    "imported_from",
    "imported_sha256",
    "scheme",
    "coverage",
)


def _model_rows(encoder: ImageEncoder, about: Mapping[str, str]) -> dict[str, object]:
    inner = encoder.encoder
    stem = ", ".join(f"{name}={value}" for name, value in encoder.stem.settings.items())
    return {
        "stem": f"{encoder.stem.name} ({stem})",
        "width, heads": f"{inner.width}, {inner.heads}",
        "blocks x branches": f"{inner.depth} x {inner.branches}",
        "positions": inner.positions,
        "tokenizer": about.get("tokenizer", "not on record"),
        **{
            name: about[name]
            for name in ("weights", "positions_from", "regrouped")
            if name in about
        },
    }


def _data_rows(config: Config, facts: Mapping[str, Any]) -> dict[str, object]:
    """Names and digests; folders of the machine are nobody's business."""
    return {
        "train": _named(config.data.train),
        "train digest": facts.get("train_digest", "not on record"),
        "held out": _named(config.data.heldout),
        "held-out digest": facts.get("heldout_digest", "not on record"),
        "image size": config.data.image_size,
        "crop scale, flip, jitter": f"{list(config.data.crop_scale)}, {config.data.flip}, "
        f"{config.data.jitter}",
    }


def _named(which: Any) -> str:
    """Sets and patterns without their folders."""
    if which is None:
        return "none"
    if isinstance(which, list):
        return ", ".join(map(_named, which))
    return Path(which).name if isinstance(which, str) else _named(which.shards)


def _budget_rows(config: Config, newest: Path) -> dict[str, object]:
    state = checkpoint.read_state(newest)
    summary = read_json(newest.parent.parent / "summary.json")
    precision = read_json(newest.parent.parent / "run.json").get("facts", {}).get("precision")
    return {
        "updates": state["updates"],
        "batch": config.train.batch_size,
        "images seen": state["position"],
        "planned epochs": config.train.epochs or "given in steps",
        "peak learning rate, weight decay": f"{config.train.lr:g}, {config.train.weight_decay:g}",
        "precision": precision or config.engine.precision,
        "images a second": summary.get("images_per_second") or "not on record",
        "seed": config.seed,
    }


def _audit_rows(folder: Path) -> list[tuple[str, str]]:
    """The leak audit of the run; of any other, that it lies in the run folder."""
    rows = []
    for path in sorted((folder / "audits").glob("*.json")):
        if path.name != "leak.json":
            rows.append((path.stem, f"{path.name} in the run folder"))
            continue
        for leak in json.loads(path.read_text(encoding="utf-8")):
            rows.append((
                f"leak of pixels under the mask, {leak['mode']}",
                f"moves {leak['visible_moved']:.1%} of the visible tokens, by "
                f"{leak['mean_relative']:.1%} on average, {leak['max_relative']:.1%} at most",
            ))  # fmt: skip
    return rows
