"""Finetuned models in folders: an encoder that `mimkit.load_encoder` opens, and beside it a head.

A folder holds `model.safetensors` (the format of `mimkit export --format safetensors`) or, to save
room, `delta.safetensors`: of the encoder only what differs from the one that was finetuned. The
head (norm and linear layer) is in `head.safetensors`. Nothing is pickled.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimkit import __version__
from mimkit.class_names import names_on_record
from mimkit.encoder_io import existing, load_encoder
from mimkit.errors import UserError
from mimkit.export._pretrained import Normalisation, save_encoder
from mimkit.export._recipe import encoder_recipe, rebuilt, stem_recipe
from mimkit.export._tensors import read_tensors, write_tensors
from mimkit.files import atomic_folder
from mimkit.models.classifier import ImageClassifier
from mimkit.models.encoder import ImageEncoder

BEST = "best"  # in a run folder
MODEL, DELTA, HEAD = "model.safetensors", "delta.safetensors", "head.safetensors"
_DELTA_FORMAT, _HEAD_FORMAT = "mimkit.delta.1", "mimkit.head.1"
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Classifier:
    """A finetuned model in eval mode on the CPU, and what it needs to be used.

    Attributes:
        classes: names of the classes, or empty.
        about: what its run said of itself.
    """

    model: ImageClassifier
    normalisation: Normalisation
    classes: tuple[str, ...]
    about: Mapping[str, str]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels that its positions belong to."""
        patch = self.model.stem.patch_size
        rows, columns = self.model.encoder.grid
        return rows * patch, columns * patch


def finetuned_folder(path: Path) -> Path | None:
    """Where the best weights of a finetuning lie: of its run folder, or in `path` itself."""
    for folder in (path / BEST, path):
        if (folder / HEAD).exists():
            return folder
    return None


def load_classifier(path: str | Path) -> Classifier:
    """The best weights of a finetuning.

    Args:
        path: its run folder, its `best`, or a folder that `mimkit merge` wrote.

    Raises:
        UserError: it is none of these, holds a delta only, or is damaged.
    """
    folder = finetuned_folder(existing(Path(path)))
    if folder is None:
        raise UserError(
            f"{path} holds no finetuned model (no {HEAD}); give a run folder of tools/finetune.py"
        )
    encoder = load_encoder(folder)
    return _with_head(folder, encoder.image_encoder, encoder.normalisation, encoder.about)


def _with_head(
    folder: Path, encoder: ImageEncoder, pixels: Normalisation, about: Mapping[str, str]
) -> Classifier:
    head = read_head(folder)
    model = ImageClassifier(
        encoder, num_classes=len(head.weights["head.bias"]), pooling=head.pooling
    )
    model.load_state_dict({**model.state_dict(), **head.weights})
    return Classifier(model.eval(), pixels, head.classes, about)


@dataclass(frozen=True)
class Head:
    """Norm and linear layer under the names they have in `ImageClassifier`."""

    weights: Weights
    pooling: str
    classes: tuple[str, ...]


def read_head(folder: Path) -> Head:
    """UserError where it is damaged or of another format."""
    metadata, weights = read_tensors(folder / HEAD)
    if metadata.get("mimkit_format") != _HEAD_FORMAT:
        raise UserError(f"{folder / HEAD} is '{metadata.get('mimkit_format')}', expected "
                        f"'{_HEAD_FORMAT}'; this is mimkit {__version__}")  # fmt: skip
    return Head(weights, metadata["pooling"], names_on_record(json.loads(metadata["classes"])))


def weights_digest(weights: Weights) -> str:
    """SHA-256 over names, shapes and bytes, whatever file they came from."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_classifier(folder: Path, classifier: Classifier, *, base: Weights | None) -> None:
    """Into `folder`: the head, and the whole encoder or its delta on `base`."""
    metadata = {"mimkit_format": _HEAD_FORMAT, "mimkit_version": __version__,
                "pooling": classifier.model.pooling,
                "classes": json.dumps(classifier.classes)}  # fmt: skip
    write_tensors(folder / HEAD, classifier.model.head_state(), metadata=metadata)
    encoder = classifier.model.image_encoder
    if base is None:
        save_encoder(folder / MODEL, encoder, normalisation=classifier.normalisation,
                     about=classifier.about)  # fmt: skip
        return
    changed = {name: weight for name, weight in encoder.state_dict().items()
               if name not in base or not _equal(weight, base[name])}  # fmt: skip
    facts: dict[str, Any] = {
        "base_digest": weights_digest(base),
        "stem": stem_recipe(encoder.stem),
        "encoder": encoder_recipe(encoder.encoder),
        "normalisation": classifier.normalisation,
        "about": dict(classifier.about),
    }
    metadata = {"mimkit_format": _DELTA_FORMAT, "mimkit_version": __version__,
                "delta": json.dumps(facts)}  # fmt: skip
    write_tensors(folder / DELTA, changed, metadata=metadata)


def merged(path: Path, base: Weights, *, base_name: str) -> Classifier:
    """A delta on its base: what would have been written whole, bit for bit.

    Args:
        path: a folder with a delta in it, or the run folder.
        base: the encoder's that `init` was; `base_name` is for messages.

    Raises:
        UserError: there is no delta, or it belongs to another encoder.
    """
    folder = finetuned_folder(existing(path))
    if folder is None or not (folder / DELTA).exists():
        raise UserError(f"{path} holds no {DELTA}; give the folder of a finetuning that was run "
                        "with output.delta=true")  # fmt: skip
    facts, changed = _read_delta(folder / DELTA)
    if (found := weights_digest(base)) != facts["base_digest"]:
        raise UserError(
            f"{folder / DELTA} belongs to an encoder with the hash {facts['base_digest'][:12]}, "
            f"and {base_name} has {found[:12]}; give the one that was finetuned: "
            f"{facts['about'].get('init', 'not on record')}"
        )
    encoder = rebuilt(stem=facts["stem"], encoder=facts["encoder"])
    encoder.load_state_dict({n: changed[n] if n in changed else base[n]
                             for n in encoder.state_dict()})  # fmt: skip
    mean, std = (tuple(values) for values in facts["normalisation"])
    return _with_head(folder, encoder, Normalisation(mean, std), facts["about"])


def _read_delta(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    metadata, changed = read_tensors(file)
    if metadata.get("mimkit_format") != _DELTA_FORMAT:
        raise UserError(f"{file} is '{metadata.get('mimkit_format')}', expected '{_DELTA_FORMAT}'; "
                        f"this is mimkit {__version__}")  # fmt: skip
    facts: dict[str, Any] = json.loads(metadata["delta"])
    return facts, changed


def open_best(folder: Path, base: Weights | None) -> Classifier:
    """The folder of `write_classifier`, whichever way it was written; `base` is the delta's."""
    if (folder / DELTA).exists():
        assert base is not None, "a delta has a base"
        return merged(folder, base, base_name="init")
    return load_classifier(folder)


def keep_best(run: Path, updates: int, write: Callable[[Path], None]) -> None:
    """Replaces `run`/best by what `write` puts into the folder it is given: all of it or nothing.

    `best` is a link, so that a reader finds the old one or the new one, at any moment.
    """
    path = run / f"{BEST}-{updates:08d}"
    if not path.exists():  # left by a run that was stopped right after saving: it is the same
        with atomic_folder(path) as temporary:
            write(temporary)
    link, temporary_link = run / BEST, run / f".{BEST}.tmp"
    temporary_link.unlink(missing_ok=True)
    temporary_link.symlink_to(path.name)
    temporary_link.replace(link)
    for old in run.glob(f"{BEST}-*"):
        if old != path:
            shutil.rmtree(old)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
