"""Probes of one finished pretraining: predictions of every held-out image, in its run folder."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mimkit import build
from mimkit.config import Config, PartConfig, Settings
from mimkit.data.loader import eval_loader
from mimkit.data.sampler import first_samples
from mimkit.data.sources import Source
from mimkit.downstream.features import Features, encoder_features, extract
from mimkit.downstream.predictions import Predictions, load_predictions
from mimkit.downstream.probes import PROBES, Probe
from mimkit.downstream.select import select
from mimkit.encoder_io import load_encoder
from mimkit.errors import UserError
from mimkit.files import write_text

_BATCH = 64


@dataclass(frozen=True)
class Probing:
    """Which probes, with which settings, on how many images of each split."""

    probes: dict[str, Settings]
    train_limit: int
    heldout_limit: int

    def folder(self, run: Path) -> Path:
        """Other settings go into another folder, so that none is taken for these."""
        text = json.dumps(asdict(self), sort_keys=True)
        return run / "probes" / hashlib.sha256(text.encode()).hexdigest()[:8]

    def predictions(self, run: Path, probe: str) -> Predictions | None:
        """What was found before."""
        file = self.folder(run) / f"{probe}.safetensors"
        return load_predictions(file) if file.exists() else None

    def missing(self, run: Path) -> list[str]:
        return [name for name in self.probes
                if not (self.folder(run) / f"{name}.safetensors").exists()]  # fmt: skip


def evaluate(config: Config, run: Path, probing: Probing) -> None:
    """Every probe that has not been made yet, on the encoder that an export would give.

    The images, their views and the choice of layer, pooling and rate are the same for all runs of a
    seed. Nothing is trained but the heads.

    Raises:
        UserError: the data have no labels.
    """
    names = probing.missing(run)
    if not names:
        return
    train, heldout = build.build_data(config.data)
    _check_labels(train, heldout)
    assert heldout is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = {name: _part(name, probing.probes[name], device, config.seed) for name in names}
    tokens = any(part.needs_tokens for part in parts.values())
    gallery, queries = (
        _features(config, run, source, limit, device, tokens=tokens)
        for source, limit in ((train, probing.train_limit), (heldout, probing.heldout_limit))
    )
    num_classes = 1 + int(max(gallery.label_B.max(), queries.label_B.max()))
    for name, part in parts.items():
        found = select(
            part, gallery, queries, num_classes=num_classes, seed=config.seed,
            source=heldout.digest, progress=lambda stage, done, total: None,
            made_by={"run": run.name, "probe": name},
        )  # fmt: skip
        best: dict[str, Any] = {**found.best.candidate._asdict(), "validation": found.best.top1}
        folder = probing.folder(run)
        write_text(folder / f"{name}.json", json.dumps(best, indent=1))
        found.predictions.save(folder / f"{name}.safetensors")


def _part(name: str, settings: Settings, device: torch.device, seed: int) -> Probe:
    return build.make_part(PROBES, PartConfig(name=name, **settings), device=device, seed=seed)


def _check_labels(train: Source, heldout: Source | None) -> None:
    for name, source in (("data.train", train), ("data.heldout", heldout)):
        if source is None or (source.labels < 0).any():
            raise UserError(
                f"{name} has no labels, and probes need them; give labelled shards, or study the "
                "regimes finetuning or supervised on other data"
            )


def _features(
    config: Config, run: Path, source: Source, limit: int, device: torch.device, *, tokens: bool
) -> Features:
    """After every block; and the tokens after the last one."""
    encoder = load_encoder(run).image_encoder
    depth = encoder.encoder.depth
    layers, token_layers = tuple(range(1, depth + 1)), (depth,) if tokens else ()
    look = encoder_features(encoder, layers=layers, token_layers=token_layers, device=device,
                            mean=config.data.mean, std=config.data.std)  # fmt: skip
    batches = eval_loader(source=source, view=build.build_probe_view(config.data, "patches"),
                          mask=None, seed=config.seed, batch_size=_BATCH, rank=0, world=1,
                          workers=0, limit=limit)  # fmt: skip
    found = extract(look, batches, num_images=len(first_samples(source.sets, limit)))
    return Features(found.arrays["pooled"], layers, found.label_B, found.index_B,
                    found.arrays.get("tokens"), token_layers)  # fmt: skip
