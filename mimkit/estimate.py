"""What a pretraining or a finetuning will take: a few real updates in a folder of their own, and
arithmetic.

The short run has the whole one's model, engine, ranks, batches and loader; it saves, evaluates,
draws, probes and tests as that does, each about once. It measures itself (`seconds` and
`peak_memory_mib` in its summary).
"""

import contextlib
import io
import json
import os
import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mimkit.config import Config, FinetuneConfig
from mimkit.runs import RunFolder
from mimkit.snapshots import most_checkpoints

_PROBED = 512  # images of each half of the probe in the short run
_WINDOWS = 5  # of updates, that are timed by themselves
_EVALUATED = 512  # of the held-out loss; a finetuning judges all that it has
_PIXELS = 3 * 32 * 32 * 4  # bytes of an image as kNN on raw pixels has it


class Length(NamedTuple):
    """Of the whole run: updates, and images that there are to train on and to judge by."""

    steps: int
    train: int
    judged: int


@dataclass(frozen=True)
class Estimate:
    """Of the whole run. Seconds, bytes, images, patches."""

    steps: int
    step: float  # seconds of an update
    images_per_second: float
    parts: Mapping[str, float]  # what the time goes into
    peak_bytes: int  # of the largest rank: memory of the GPU, or of the process on a CPU
    on_gpu: bool
    checkpoint_bytes: int
    disk_bytes: int  # of the run folder at its fullest
    images: int
    patches: int  # of all images
    predicted: int  # of them, those whose targets are predicted
    measured_steps: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def measure(
    config: Config | FinetuneConfig, run: Callable[..., RunFolder], *, steps: int, started_at: float
) -> Path:
    """`run` on every rank, short, under `runs_dir`; its folder."""
    above = Path(config.output.runs_dir) / f".estimate-{os.getpid()}"
    short = _short(config, steps=steps, folder=above / "run")
    with contextlib.redirect_stdout(io.StringIO()):
        return run(short, started_at=started_at).path


def remove(folder: Path) -> None:
    """What `measure` left; rank 0 does it when everything has been read."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    with contextlib.suppress(OSError):  # other runs are there
        folder.parent.parent.rmdir()


def _short(config: Config | FinetuneConfig, *, steps: int, folder: Path) -> Config | FinetuneConfig:
    """A checkpoint is written while the last update is made, as most of the whole run's are. Some
    lines of metrics, since one of them may have met with something that happens once."""
    settings = config.model_dump(mode="json")
    settings["train"] |= {"steps": steps, "epochs": None}
    settings["output"] |= {"dir": str(folder), "checkpoint_every": steps - 1, "keep_every": None,
                           "evaluate_every": steps,
                           "log_every": max(1, (steps - 1) // _WINDOWS)}  # fmt: skip
    if isinstance(config, Config):
        settings["output"]["picture_every"] = steps
        settings["data"]["heldout_limit"] = min(config.data.heldout_limit, _EVALUATED)
        for half in ("train_limit", "heldout_limit"):
            settings["probe"][half] = min(settings["probe"][half], _PROBED)
        if config.probe.every is not None:
            settings["probe"]["every"] = steps
    return type(config).model_validate(settings)


def estimate(config: Config | FinetuneConfig, folder: Path, length: Length) -> Estimate:
    """Out of the folder of a short run."""
    short = _Short(folder)
    steps, batch, output = length.steps, config.train.batch_size, config.output
    step = batch / short.rate
    saves = _times(output.checkpoint_every, steps)
    evaluations = _times(output.evaluate_every, steps)
    parts = {
        "start and first update": short.summary["seconds_to_first_step"],
        "updates": (steps - 1) * step,
        "evaluations": evaluations * short.once("evaluate"),
        "checkpoints": saves * short.stall(output.checkpoint_every * step) + short.write,
    }
    if isinstance(config, Config):
        parts |= _of_pretraining(config, short, parts["evaluations"], length)
    else:
        parts["test"] = short.once("test")
    return Estimate(
        steps=steps, step=step, images_per_second=short.rate, parts=parts,
        peak_bytes=(short.summary["peak_memory_mib"] << 20) + _more_memory(config, short, length),
        on_gpu=torch.cuda.is_available(),
        checkpoint_bytes=short.checkpoint, disk_bytes=_disk(config, short, steps=steps),
        images=steps * batch, patches=steps * batch * short.summary["patches"],
        predicted=steps * batch * short.summary.get("masked_patches", 0),
        measured_steps=short.summary["steps"],
    )  # fmt: skip


class _Short:
    """What a short run measured, and wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
        self.lines = len(lines)
        told = [json.loads(line) for line in lines]
        rates = [line["images_per_second"] for line in told if "images_per_second" in line]
        self.rate = statistics.median(rates)  # images per second
        found = [line for line in told if line["kind"] == "checkpoint"]
        self.write: float = found[0]["seconds"]  # of a checkpoint, in the background
        self._stalled: float = found[0]["stalled_seconds"]  # the second one waits for the first
        self.checkpoint = size(folder / "checkpoints" / f"step-{self.summary['steps']:08d}")

    def once(self, name: str) -> float:
        """Seconds of what the stopwatch calls so; 0 where it was not done."""
        lap = self.summary["seconds"].get(name)
        return float(lap["seconds"] / lap["times"]) if lap else 0.0

    def stall(self, between: float) -> float:
        """Seconds that training stands still for a checkpoint, with so many between two."""
        return self._stalled + max(0.0, self.write - between)


def _of_pretraining(
    config: Config, short: _Short, evaluations: float, length: Length
) -> dict[str, float]:
    """Where a short run looks at fewer images than the whole one, in proportion."""
    limit = min(config.data.heldout_limit, length.judged)
    more = limit / min(limit, _EVALUATED)
    whole = _probed(config, length)
    probed = sum(whole) / sum(min(images, _PROBED) for images in whole)
    every = config.probe.every  # those on the way look at as many as the short run's
    on_the_way = 0.0 if every is None else _times(every, length.steps) * short.once("probe")
    return {
        "evaluations": evaluations * more,
        "losses of means": short.once("mean_losses") * more,
        "pictures": _times(config.output.picture_every, length.steps) * short.once("draw"),
        "probes": short.once("final_probe") * probed + on_the_way,
    }


def _probed(config: Config, length: Length) -> tuple[int, int]:
    """Images of both halves of the probe at the end of the whole run."""
    probe = config.probe
    return min(probe.train_limit, length.train), min(probe.heldout_limit, length.judged)


def _more_memory(config: Config | FinetuneConfig, short: _Short, length: Length) -> int:
    """Bytes that the probe of the whole run keeps beyond those of the short one, at most.

    On a CPU, where features lie in the memory that is told; kNN makes two copies of the gallery.
    """
    on_cpu = not torch.cuda.is_available()
    if not (isinstance(config, Config) and on_cpu and "knn_top1" in short.summary):
        return 0
    gallery, queries = (max(0, images - _PROBED) for images in _probed(config, length))
    return (3 * gallery + queries) * _PIXELS


def _times(every: int, steps: int) -> int:
    """How often a hook is called: after every so many updates, and after the last."""
    return steps // every + bool(steps % every)


def _disk(config: Config | FinetuneConfig, short: _Short, *, steps: int) -> int:
    """Checkpoints and the one that is being written, the best weights and those that take their
    place, pictures, lines of metrics, all else."""
    output, folder = config.output, short.folder
    checkpoints, logs = folder / "checkpoints", (folder / "metrics.jsonl", folder / "tensorboard")
    best, pictures = size(folder / "best"), size(folder / "pictures")
    evaluations = _times(output.evaluate_every, steps)
    written = sum(map(size, logs))
    rest = size(folder) - size(checkpoints) - best - pictures - written
    lines = steps // output.log_every + evaluations + _times(output.checkpoint_every, steps) + 1
    drawn = _times(config.output.picture_every, steps) if isinstance(config, Config) else 0
    return (most_checkpoints(config, steps) * short.checkpoint + best * min(evaluations, 2)
            + pictures * drawn + written * lines // short.lines + rest)  # fmt: skip


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 where there is none."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
