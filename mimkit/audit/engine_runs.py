"""The two configurations that the engine audit trains: plain PyTorch, and the user's."""

import json
from pathlib import Path
from typing import Any

from mimkit import build
from mimkit.config import Config, to_yaml
from mimkit.errors import UserError
from mimkit.train.runtimes._deepspeed_json import read_json

_SAMPLES = 8  # of one forward: enough to see a difference, and small on any machine
_WARMUP = 0.5  # of the few updates: they go from a small to the full learning rate and down again
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")


def batch_size(config: Config, *, ranks: int) -> int:
    """A small global batch that divides among ranks and accumulation; UserError if none does."""
    unit = ranks * config.engine.accumulation
    size = min(config.train.batch_size // unit, _SAMPLES) * unit
    if not size:
        raise UserError(
            f"train.batch_size={config.train.batch_size} does not fill {ranks} ranks x "
            f"{config.engine.accumulation} accumulated micro-batches; set --ranks or "
            "engine.accumulation lower"
        )
    return size


def write_configs(
    config: Config, folder: Path, *, steps: int, ranks: int, batch: int | None
) -> tuple[Path, Path]:
    """`plain.yaml` and `theirs.yaml` in `folder`; their runs will be folders there, `plain` and
    `theirs`. Everything that is no training is made as short as it can be.

    Raises:
        UserError: the engine is not DeepSpeed; the DeepSpeed JSON cannot be read.
    """
    if config.engine.runtime != "deepspeed":
        raise UserError("engine.runtime=local is what is compared with; set it to deepspeed")
    theirs = _short(config, steps=steps, batch=batch or batch_size(config, ranks=ranks))
    engine = theirs["engine"] | {
        "precision": "bf16" if build.use_bf16(config.engine) else "fp32",
        "deepspeed_config": _without_batch(config, folder),
    }
    alone = engine | {"runtime": "local", "zero_stage": 0, "accumulation": 1,
                      "deepspeed_config": None, "activation_checkpointing": False,
                      "compile": False}  # fmt: skip
    paths = []
    for name, settings in (("plain", alone), ("theirs", engine)):
        output = theirs["output"] | {"dir": str(folder / name)}
        whole = Config.model_validate(theirs | {"engine": settings, "output": output})
        path = folder / f"{name}.yaml"
        path.write_text(to_yaml(whole), encoding="utf-8")
        paths.append(path)
    return paths[0], paths[1]


def _short(config: Config, *, steps: int, batch: int) -> dict[str, Any]:
    settings = config.model_dump(mode="json")
    settings["train"] |= {"steps": steps, "epochs": None, "batch_size": batch, "warmup": _WARMUP}
    settings["data"]["heldout_limit"] = _SAMPLES
    if config.data.heldout_fraction is None:  # else it decides what is trained on
        settings["data"]["heldout"] = None
    settings["probe"] |= {"train_limit": _SAMPLES, "heldout_limit": _SAMPLES, "neighbours": 1,
                          "every": None}  # fmt: skip
    settings["output"] |= {"log_every": 1, "checkpoint_every": steps, "keep_checkpoints": 1,
                           "evaluate_every": steps, "picture_every": steps,
                           "keep_every": None, "tensorboard": False}  # fmt: skip
    return settings


def _without_batch(config: Config, folder: Path) -> str | None:
    """The user's DeepSpeed JSON; where it names batch sizes, a copy without these."""
    file = build.deepspeed_file(config.engine)
    if file is None:
        return None
    settings = read_json(file)
    if not settings.keys() & set(_BATCH_KEYS):
        return str(file)
    copy = folder / file.name
    kept = {key: value for key, value in settings.items() if key not in _BATCH_KEYS}
    copy.write_text(json.dumps(kept), encoding="utf-8")
    return str(copy)
