"""The finetuning of a run, and the supervised training of its arm: configuration and folder."""

import hashlib
import json
import time
from pathlib import Path
from typing import Literal

from mimkit import build
from mimkit.ablation.jobs import launch
from mimkit.ablation.machine import Slot
from mimkit.ablation.plan import Run, configuration_file
from mimkit.config import (
    FinetuneConfig,
    Settings,
    SourceConfig,
    StudyConfig,
    load_finetune_config,
    science_of,
    to_yaml,
)
from mimkit.downstream.predictions import FILE, Predictions, load_predictions
from mimkit.files import write_text

ClassifierRegime = Literal["finetuning", "supervised"]
CLASSIFIERS: tuple[ClassifierRegime, ...] = ("finetuning", "supervised")
_ARCHITECTURE = ("size", "depth", "patch_size", "positions", "layer_scale", "qkv_bias", "branches")


def classifier_config(study: StudyConfig, run: Run, regime: ClassifierRegime) -> FinetuneConfig:
    """Of this run's encoder, or of its arm from scratch; on the data of the pretraining.

    Raises:
        UserError: a setting does not exist.
    """
    section, arm = getattr(study, regime), study.present_arms[run.arm]
    data = run.config.data.model_dump(mode="json", include=set(SourceConfig.model_fields))
    common: Settings = {"data": {**data, "image_size": run.config.data.image_size}}
    given: Settings = {"name": regime, "seed": run.seed, "init": str(run.folder)}
    if regime == "supervised":
        encoder = run.config.encoder.model_dump(mode="json", include=set(_ARCHITECTURE))
        given |= {"init": None, "stem": run.config.stem.model_dump(), "encoder": encoder}
    if regime in run.steps:
        given |= {"train": {"steps": run.steps[regime], "epochs": None}}
    path = configuration_file(section.base, key=f"{regime}.base")
    config = load_finetune_config(path, layers=[common, section.settings, arm.classifier, given])
    folder = _folder(run, regime, config)
    return config.model_copy(
        update={"output": config.output.model_copy(update={"dir": str(folder)})}
    )


def _folder(run: Run, regime: ClassifierRegime, config: FinetuneConfig) -> Path:
    """Beside the pretraining that it starts from; other settings go into another folder."""
    science = science_of(config) | build.code_digests(config)
    science.pop("init")
    name = hashlib.sha256(json.dumps(science, sort_keys=True).encode()).hexdigest()[:8]
    if regime == "finetuning":
        return run.folder / f"finetuning-{name}"
    return run.home.parent / "supervised" / f"{run.arm}-seed{run.seed}-{name}"


def classifier_predictions(config: FinetuneConfig) -> Predictions | None:
    """Of the best weights, on the held-out images; None where the run is not finished."""
    folder = Path(config.output.dir or "")
    if not (folder / "summary.json").exists():
        return None
    return load_predictions(folder / "best" / FILE)


def train_classifier(config: FinetuneConfig, slot: Slot) -> None:
    """Begins, continues, or finds finished."""
    if slot.ranks > 1:
        folder = Path(config.output.dir or "")
        written = folder.with_name(f"{folder.name}.yaml")
        write_text(written, to_yaml(config))
        launch(["finetune", "--config", str(written)], slot)
        return
    from mimkit.finetuning import run

    if slot.threads is not None and config.engine.threads is None:
        engine = config.engine.model_copy(update={"threads": slot.threads})
        config = config.model_copy(update={"engine": engine})
    run(config, started_at=time.time())
