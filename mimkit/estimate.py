"""What a pretraining will take: a few real updates in a folder of their own, and arithmetic.

The short run has the whole one's model, engine, ranks, batches and loader; it evaluates, draws,
saves and probes once. Times are measured by the run itself (`seconds` in its summary).
"""

import contextlib
import io
import json
import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mimkit.config import Config
from mimkit.pretraining import run

_PROBED = 512  # images of each half of the probe in the short run
_EVALUATED = 512


@dataclass(frozen=True)
class Estimate:
    """Of the whole run. Seconds, bytes, images."""

    steps: int
    step: float  # seconds of an update
    images_per_second: float
    parts: Mapping[str, float]  # what the time goes into
    peak_bytes: int  # of the largest rank: memory of the GPU, or of the process on a CPU
    on_gpu: bool
    checkpoint_bytes: int
    disk_bytes: int  # of the run folder at its fullest
    images: int
    measured_steps: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def measure(config: Config, *, steps: int, started_at: float) -> tuple[Path, int]:
    """A short run on every rank, under `runs_dir`; its folder and this rank's peak memory."""
    above = Path(config.output.runs_dir) / f".estimate-{os.getpid()}"
    short = _short(config, steps=steps, folder=above / "run")
    with contextlib.redirect_stdout(io.StringIO()):
        folder = run(short, started_at=started_at)
    return folder.path, peak_memory()


def peak_memory() -> int:
    """Of this process so far: memory of the GPU where there is one, else resident memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def remove(folder: Path) -> None:
    """What `measure` left; rank 0 does it when everything has been read."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    with contextlib.suppress(OSError):  # other runs are there
        folder.parent.parent.rmdir()


def _short(config: Config, *, steps: int, folder: Path) -> Config:
    settings = config.model_dump(mode="json")
    settings["train"] |= {"steps": steps, "epochs": None}
    settings["output"] |= {"dir": str(folder), "checkpoint_every": steps, "picture_every": steps,
                           "evaluate_every": steps, "keep_every": None}  # fmt: skip
    settings["data"]["heldout_limit"] = min(config.data.heldout_limit, _EVALUATED)
    for half in ("train_limit", "heldout_limit"):
        settings["probe"][half] = min(settings["probe"][half], _PROBED)
    if settings["probe"].get("every") is not None:
        settings["probe"]["every"] = steps
    return Config.model_validate(settings)


def estimate(config: Config, folder: Path, *, steps: int, peak_bytes: int) -> Estimate:
    """Out of the folder of a short run.

    Args:
        steps: of the whole run.
        peak_bytes: of rank 0.
    """
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))
    rate = summary["images_per_second"]
    step = config.train.batch_size / rate
    once = {name: lap["seconds"] / lap["times"] for name, lap in summary["seconds"].items()}
    output = config.output
    evaluations = _times(output.evaluate_every, steps)
    parts = {
        "start and first update": summary["seconds_to_first_step"],
        "updates": (steps - 1) * step,
        "evaluations": evaluations * once.get("evaluate", 0.0) * _more(config, "evaluate"),
        "pictures": _times(output.picture_every, steps) * once.get("draw", 0.0),
        "checkpoints": _times(output.checkpoint_every, steps) * once.get("save", 0.0),
        "probes": once.get("final_probe", 0.0) * _more(config, "probe")
        + (_times(config.probe.every, steps) * once.get("probe", 0.0) * _more(config, "probe")
           if config.probe.every is not None else 0.0),
    }  # fmt: skip
    saved = _size(folder / "checkpoints")
    return Estimate(
        steps=steps, step=step, images_per_second=rate, parts=parts, peak_bytes=peak_bytes,
        on_gpu=torch.cuda.is_available(), checkpoint_bytes=saved,
        disk_bytes=_disk(config, folder, saved, steps=steps),
        images=steps * config.train.batch_size, measured_steps=summary["steps"],
    )  # fmt: skip


def _times(every: int, steps: int) -> int:
    """How often a hook is called: after every so many updates, and after the last."""
    return steps // every + bool(steps % every)


def _more(config: Config, what: str) -> float:
    """How many times the images of the short run the whole one looks at."""
    if what == "evaluate":
        return config.data.heldout_limit / min(config.data.heldout_limit, _EVALUATED)
    whole = config.probe.train_limit + config.probe.heldout_limit
    return whole / (min(config.probe.train_limit, _PROBED)
                    + min(config.probe.heldout_limit, _PROBED))  # fmt: skip


def _disk(config: Config, folder: Path, saved: int, *, steps: int) -> int:
    """Checkpoints that are kept and the one that is being written, pictures, all else."""
    output = config.output
    kept = min(output.keep_checkpoints, _times(output.checkpoint_every, steps)) + 1
    if output.keep_every is not None:
        kept += steps // output.keep_every
    pictures = _size(folder / "pictures")
    rest = _size(folder) - saved - pictures
    return kept * saved + pictures * _times(output.picture_every, steps) + rest


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
