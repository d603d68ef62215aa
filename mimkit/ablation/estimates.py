"""Time and disk of a study before it begins, from measured steps and counted weights."""

import math
from dataclasses import dataclass

from mimkit import build
from mimkit.ablation.budgets import ArmCost
from mimkit.ablation.classifiers import CLASSIFIERS, classifier_config
from mimkit.ablation.jobs import shared_banks
from mimkit.ablation.plan import Plan, Run
from mimkit.ablation.runner import Task, pretrains, tasks_of
from mimkit.config import Config, FinetuneConfig, SourceConfig, StudyConfig
from mimkit.encoder_io import sides_of
from mimkit.snapshots import last_checkpoints, most_checkpoints
from mimkit.train.stopwatch import duration

_OVERHEAD = 1.25  # optimizer, loader and evaluations over forward and backward, measured
_GIGABYTES = 4e-9  # of a number
_START = 6.0  # seconds of a run besides its steps, on two cores
_STATES = 3  # a checkpoint has the weights and AdamW's two moments, fp32; and their average


@dataclass(frozen=True)
class Estimate:
    """Of what is still missing.

    Attributes:
        runs, finished: of the study.
        seconds: None on a GPU, where the first run will tell.
        gigabytes: of checkpoints and token banks, those that are being written too.
    """

    runs: int
    finished: int
    seconds: float | None
    gigabytes: float

    def __str__(self) -> str:
        time = "after the first run the progress line tells how long it takes"
        if self.seconds is not None:
            time = f"about {duration(self.seconds)} on this machine if nothing else runs"
        done = f", {self.finished} finished" if self.finished else ""
        return f"{self.runs} runs{done}; {time}; {self.gigabytes:#.3g} GB of disk"


@dataclass(frozen=True)
class _Work:
    """Of one task: milliseconds of a core, gigabytes that stay, and those that pass."""

    milliseconds: float
    gigabytes: float
    passing: float


def estimate(plan: Plan, costs: dict[str, ArmCost], *, cores: int | None, jobs: int) -> Estimate:
    """
    Args:
        cores: that train; None on GPUs.
        jobs: at a time.
    """
    sources = _Sources()
    todo = [(run, tasks_of(plan.study, run)) for run in plan.runs]
    works = {task.name: _work(plan.study, run, task.what, costs[run.arm], sources)
             for run, tasks in todo for task in tasks}  # fmt: skip
    missing = [run for run, tasks in todo if tasks]
    passing = jobs * max((one.passing for one in works.values()), default=0.0)
    gigabytes = passing + sum(one.gigabytes for one in works.values()) + _banks(plan, todo, sources)
    seconds = None
    if cores is not None:
        seconds = sum(one.milliseconds for one in works.values()) / 1e3 / cores + _START * len(
            works
        )
    return Estimate(len(plan.runs), len(plan.runs) - len(missing), seconds, gigabytes)


class _Sources:
    """Images to train on and held-out images; each data set is opened once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}

    def images(self, data: SourceConfig) -> tuple[int, int]:
        key = data.model_dump_json(include=set(SourceConfig.model_fields))
        if key not in self._known:
            train, heldout = build.build_data(data)
            self._known[key] = train.epoch_length, 0 if heldout is None else len(heldout)
        return self._known[key]


def _work(study: StudyConfig, run: Run, what: str, cost: ArmCost, sources: _Sources) -> _Work:
    for regime in CLASSIFIERS:
        if what == regime:
            config = classifier_config(study, run, regime)
            return _classifying(config, cost, sources, side=run.config.data.image_size)
    return _pretraining(study, run, cost, sources)


def _classifying(config: FinetuneConfig, cost: ArmCost, sources: _Sources, *, side: int) -> _Work:
    """
    Args:
        side: of the images that the cost is of.
    """
    images, heldout = sources.images(config.data)
    steps = build.num_steps(config.train, images)
    judged = heldout * math.ceil(steps / config.output.evaluate_every)
    spent = steps * config.train.batch_size * cost.ms_train * _OVERHEAD + judged * cost.ms_forward
    rows, columns = sides_of(config.data.image_size)
    stay, passing = _checkpoints(config, cost, steps)
    best = _GIGABYTES * cost.params  # weights; those that take their place are written beside them
    return _Work(rows * columns / side**2 * spent, stay + best, passing + best)


def _pretraining(study: StudyConfig, run: Run, cost: ArmCost, sources: _Sources) -> _Work:
    steps = build.num_steps(run.config.train, sources.images(run.config.data)[0])
    spent = steps * run.config.train.batch_size * cost.ms_train * _OVERHEAD
    if "probes" in study.regimes:
        images, heldout = sources.images(run.config.data)
        train_limit, heldout_limit = study.probe_images
        spent += cost.ms_forward * (min(train_limit, images) + min(heldout_limit, heldout))
    return _Work(spent, *_checkpoints(run.config, cost, steps))


def _checkpoints(config: Config | FinetuneConfig, cost: ArmCost, steps: int) -> tuple[float, float]:
    """Gigabytes that stay, and what there is more at the most."""
    one = _GIGABYTES * cost.params * (_STATES + (config.train.ema is not None))
    left = last_checkpoints(config, steps)
    return left * one, (most_checkpoints(config, steps) - left) * one


def _banks(plan: Plan, todo: list[tuple[Run, list[Task]]], sources: _Sources) -> float:
    """Gigabytes of tokens that are not computed yet."""
    bytes_ = 0
    for bank in shared_banks(plan, [run for run, tasks in todo if pretrains(tasks)]):
        length, heldout = sources.images(bank.config.data)
        epochs = bank.epochs(length)
        if not bank.done(epochs):
            side = bank.config.data.token_size
            rows, columns = build.build_tokenizer(bank.config).grid(side, side)
            judged = min(heldout, bank.config.data.heldout_limit)
            bytes_ += 2 * rows * columns * (epochs * length + judged)
    return 1e-9 * bytes_
