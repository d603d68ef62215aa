"""Runs what a plan lacks, slot by slot: banks first, then every run that is not finished."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import torch

from mimkit import build
from mimkit.ablation import jobs
from mimkit.ablation.classifiers import (
    CLASSIFIERS,
    classifier_config,
    classifier_predictions,
    train_classifier,
)
from mimkit.ablation.evaluation import Probing
from mimkit.ablation.machine import Slot
from mimkit.ablation.plan import Plan, Run
from mimkit.ablation.pool import ClosedError, Pool
from mimkit.ablation.processes import Ended, Job, process_context
from mimkit.ablation.spent import Spent, read_spent
from mimkit.config import FinetuneConfig, StudyConfig
from mimkit.train.stopwatch import duration

Say = Callable[[str], object]


@dataclass(frozen=True)
class Task:
    """One process's work; what it leaves shows whether it is done."""

    name: str  # of its log
    what: str
    action: Callable[..., None]
    arguments: Callable[[Slot, Path | None], dict[str, object]]


def probing_of(study: StudyConfig) -> Probing | None:
    """What probes make of each run; None in a study without them."""
    if "probes" not in study.regimes:
        return None
    probes = {str(name): settings for name, settings in study.probes.items()}
    return Probing(probes, *study.probe_images)


def tasks_of(study: StudyConfig, run: Run) -> list[Task]:
    """What is missing of a run, in order: pretraining with its probes, then classifiers."""
    probing, tasks = probing_of(study), list[Task]()
    if (set(study.regimes) - {"supervised"} and not run.finished) or (
        probing is not None and probing.missing(run.folder)
    ):
        tasks.append(
            Task(run.identity, "pretraining", jobs.pretrain_and_probe,
                 lambda slot, bank: {"config": jobs.at_home(run, bank=bank, threads=slot.threads),
                                     "slot": slot, "probing": probing})
        )  # fmt: skip
    for regime in CLASSIFIERS:
        if regime in study.regimes:
            config = classifier_config(study, run, regime)
            if classifier_predictions(config) is None:
                tasks.append(_classifier_task(run, regime, config))
    return tasks


def pretrains(tasks: list[Task]) -> bool:
    return any(task.action is jobs.pretrain_and_probe for task in tasks)


def _classifier_task(run: Run, regime: str, config: FinetuneConfig) -> Task:
    return Task(_classifier_job(run, regime, config), regime, train_classifier,
                lambda slot, bank: {"config": config, "slot": slot})  # fmt: skip


def _classifier_job(run: Run, regime: str, config: FinetuneConfig) -> str:
    """With the hash of its folder: of other settings it is another job."""
    return f"{run.identity}-{run.arm}-{regime}-{(config.output.dir or '').rpartition('-')[2]}"


def spent_on(plan: Plan, run: Run) -> dict[str, Spent]:
    """What the jobs of a run took so far, that of arms which share its pretraining too."""
    names = {} if set(plan.study.regimes) <= {"supervised"} else {"pretraining": run.identity}
    for regime in CLASSIFIERS:
        if regime in plan.study.regimes:
            names[regime] = _classifier_job(run, regime, classifier_config(plan.study, run, regime))
    found = {what: read_spent(_job_file(plan, name))[1] for what, name in names.items()}
    return {what: spent for what, spent in found.items() if spent.attempts}


def _job_file(plan: Plan, name: str) -> Path:
    return plan.folder / "jobs" / f"{name}.json"


@dataclass
class Failure:
    """What did not end well; `log` has the rest of the story."""

    arm: str
    seed: int | None  # None: of all seeds
    what: str
    error: str
    log: Path


@dataclass
class StudyRunner:
    """One study on the slots of this machine.

    Attributes:
        say: told a line for each run that ends.
        failures: of this call; other runs go on.
    """

    plan: Plan
    slots: list[Slot]
    say: Say
    failures: list[Failure] = field(default_factory=list)

    def run(self) -> None:
        """All that is missing.

        Raises:
            Interrupted: a signal asked to stop; the processes have ended.
        """
        todo = [(run, tasks_of(self.plan.study, run)) for run in self.plan.runs]
        runs = [run for run, tasks in todo if tasks]
        self._total = len({task.name for _, tasks in todo for task in tasks})
        self._done, self._walls = 0, list[float]()
        engine = self.plan.arms[self.plan.study.reference].engine.runtime
        context = process_context(cuda=torch.cuda.is_available(), engine=engine)
        self._alone = {run.identity: Lock() for run in runs}
        self._broken = dict[str, Ended]()  # tasks that several arms wait for are not tried again
        with Pool(self.slots, context, say=self.say, describe=self._stand) as self._pool:
            needing = [run for run, tasks in todo if pretrains(tasks)]
            banks = jobs.shared_banks(self.plan, needing)
            filled = self._pool.map(self._fill, banks)
            found = {(run.arm, run.seed): bank.folder for bank, there in zip(
                banks, filled, strict=True) if there for run in bank.runs}  # fmt: skip
            each = [(run, found.get((run.arm, run.seed))) for run in runs]
            self._pool.map(lambda one: self._live_through(*one), each)

    def _stand(self) -> str:
        done = self._done - len(self._broken)
        return f"{done} of the {self._total} jobs that were left are done"

    def _fill(self, bank: jobs.SharedBank) -> bool:
        """Whether it is there; if not, runs compute their own tokens, and say what is wrong."""
        epochs = bank.epochs(build.build_data(bank.config.data)[0].epoch_length)
        if bank.done(epochs):
            return True
        given = {"config": bank.config, "folder": bank.folder, "epochs": epochs}
        ended = self._live(bank.folder.name, jobs.fill_bank, lambda slot: given)
        arms = {run.arm: None for run in bank.runs}
        whose = "" if len(arms) == len(self.plan.arms) else f" ({', '.join(arms)})"
        self.say(f"tokens, crops of seed {bank.seed}{whose}: {ended.error or _took(ended)}")
        return ended.error is None

    def _live_through(self, run: Run, bank: Path | None) -> None:
        """The tasks of one run, up to the first that fails.

        Arms that differ in their classifiers only share a pretraining: one of them does it, and the
        others then find it.
        """
        with self._alone[run.identity]:
            for task in tasks_of(self.plan.study, run):
                if not self._one(run, task, bank):
                    return

    def _one(self, run: Run, task: Task, bank: Path | None) -> bool:
        """Whether it ended well.

        Raises:
            ClosedError: it was ended, since the study was asked to stop.
        """
        ended = self._broken.get(task.name)
        if ended is None:
            ended = self._live(task.name, jobs.as_planned,
                               lambda slot: {"run": run, "action": task.action,
                                             "arguments": task.arguments(slot, bank)})  # fmt: skip
            self._done += ended.error is None or not self._pool.closed
        if ended.error is None:
            self._walls.append(ended.wall)
        elif not self._pool.closed:
            self._broken[task.name] = ended
            log = self._log(task.name)
            self.failures.append(Failure(run.arm, run.seed, task.what, ended.error, log))
        self.say(f"[{self._done}/{self._total}] {run.arm}, seed {run.seed}, {task.what}: "
                 f"{ended.error or _took(ended)}{self._left()}")  # fmt: skip
        if self._pool.closed:
            raise ClosedError
        return ended.error is None

    def _left(self) -> str:
        left = self._total - self._done
        if not left or not self._walls or self._pool.closed:
            return ""
        mean = sum(self._walls) / len(self._walls)
        return f"; about {duration(mean * left / len(self.slots))} to go"

    def _live(self, name: str, action: Callable[..., None],
              arguments: Callable[[Slot], dict[str, object]]) -> Ended:  # fmt: skip
        log, result = self._log(name), _job_file(self.plan, name)
        return self._pool.live(lambda slot: Job(action, arguments(slot), log, result))

    def _log(self, name: str) -> Path:
        return self.plan.folder / "logs" / f"{name}.log"


def _took(ended: Ended) -> str:
    return f"done in {duration(ended.wall)}"
