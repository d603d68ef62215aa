"""One study from its configuration to its report."""

import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from mimkit import runs
from mimkit.ablation.budgets import ArmCost
from mimkit.ablation.classifiers import CLASSIFIERS, classifier_config
from mimkit.ablation.estimates import Estimate, estimate
from mimkit.ablation.machine import Slot
from mimkit.ablation.pages import write_report
from mimkit.ablation.pairing import Pairing, check_pairing
from mimkit.ablation.pictures import filter_picture, mask_picture, reconstruction_picture
from mimkit.ablation.plan import Plan, make_plan, study_folder
from mimkit.ablation.prices import budget_steps, study_costs
from mimkit.ablation.report import Record, make_record
from mimkit.ablation.runner import Failure, StudyRunner
from mimkit.config import StudyConfig, to_yaml
from mimkit.errors import UserError
from mimkit.files import free_space, write_text

Say = Callable[[str], object]


@dataclass(frozen=True)
class Prepared:
    """Planned and checked; nothing is trained yet.

    Attributes:
        asked: the study as it was given; the plan's lacks the arms that failed already.
        failures: those.
    """

    asked: StudyConfig
    plan: Plan
    costs: dict[str, ArmCost]
    pairing: list[Pairing]
    estimate: Estimate
    failures: list[Failure]

    def check_disk(self) -> None:
        """
        Raises:
            UserError: fewer bytes are free than what is missing needs.
        """
        free, there = free_space(self.plan.folder)
        needed = round(1e9 * self.estimate.gigabytes)
        if needed > free:
            raise UserError(
                f"what is missing of the study needs {needed / 1e9:#.3g} GB, and {free / 1e9:#.3g} "
                f"GB are free in {there}: {(needed - free) / 1e9:#.3g} GB too few. Free some "
                "space, choose another folder, fewer seeds or arms, or set "
                "settings.output.keep_checkpoints=1 (finetuning.settings.output.keep_checkpoints=1)"
            )


@contextmanager
def alone(study: StudyConfig) -> Iterator[None]:
    """Holds the study's folder: two that train in it would write each other's files.

    Raises:
        UserError: another process has it.
    """
    folder = runs.RunFolder(study_folder(study), continues=None, finished=False)
    held = runs.lock(folder, busy="another process runs a study in {path}; wait for it, or choose "
                     "another folder or name")  # fmt: skip
    try:
        yield
    finally:
        with suppress(OSError):  # it must not hide what the study was refused for
            runs.remove_if_empty(folder, held)
        held.close()


def prepare(study: StudyConfig, slots: Sequence[Slot], *, say: Say) -> Prepared:
    """
    Raises:
        UserError: anything that would make the comparison wrong or the runs fail at once.
    """
    if study.budget == "time" and slots[0].devices:
        raise UserError("budget=time is measured on a core of this machine, and runs are trained "
                        "on its GPUs; set budget=flops or steps")  # fmt: skip
    first_plan = make_plan(study)  # refuses confounds in seconds, before anything is timed
    for run in first_plan.runs[: len(first_plan.arms)]:
        for regime in CLASSIFIERS:
            if regime in study.regimes:
                classifier_config(study, run, regime)
    costs = study_costs(study, first_plan.arms, say=say)
    failures = [_not_measured(first_plan, *one) for one in costs.broken.items()]
    if failures:
        first_plan = make_plan(_without(study, costs.broken))
    steps = budget_steps(first_plan, costs.of, say=say)
    plan = first_plan if steps is None else make_plan(first_plan.study, steps=steps)
    say("building the first batch and the weights of every arm")
    pairing = check_pairing(plan.arms, reference=study.reference, allowed=_allowed(plan))
    cores = None if slots[0].threads is None else sum(s.threads * s.ranks for s in slots
                                                      if s.threads)  # fmt: skip
    found = estimate(plan, costs.of, cores=cores, jobs=len(slots))
    return Prepared(study, plan, costs.of, pairing, found, failures)


def _not_measured(plan: Plan, arm: str, error: Exception) -> Failure:
    """
    Raises:
        UserError: it is the reference.
    """
    why, log = f"{type(error).__name__}: {error}", plan.folder / "logs" / f"{arm}-cost.log"
    write_text(log, "".join(traceback.format_exception(error)))
    if arm == plan.study.reference:
        raise UserError(f"arm '{arm}' is the reference, and its cost cannot be measured: {why} "
                        f"(all of it: {log}); nothing can be compared without it, so mend its "
                        "parts, or choose another reference") from error  # fmt: skip
    return Failure(arm, None, "measuring its cost", why, log)


def _without(study: StudyConfig, broken: Collection[str]) -> StudyConfig:
    control = None if study.control in broken else study.control
    arms = {name: None if name in broken else arm for name, arm in study.arms.items()}
    return study.model_copy(update={"arms": arms, "control": control})


_CHANGES = {  # what a declared setting may change in what an arm sees
    "data": ["order", "crops", "tokens", "grid", "batches"],
    "tokenizer": ["tokens"],
    "mask": ["masks"],
    "train": ["batches"],
    "encoder.patch_size": ["grid", "masks", "tokens"],
}


def _allowed(plan: Plan) -> dict[str, list[str]]:
    """By arm, what may differ: what its declared settings change, and steps of a budget."""
    found = {}
    for arm, lines in plan.confounds.items():
        keys = [line.partition(":")[0] for line in lines]
        own = [] if plan.study.budget == "steps" else ["batches"]
        for prefix, changed in _CHANGES.items():
            if any(key == prefix or key.startswith(f"{prefix}.") for key in keys):
                own += changed
        found[arm] = own
    return found


def run_study(prepared: Prepared, slots: list[Slot], *, say: Say) -> list[Failure]:
    """Everything that is missing; `study.yaml` in its folder says what was asked for.

    Raises:
        UserError: the disk is too small.
        Interrupted: a signal asked to stop.
    """
    prepared.check_disk()
    plan = prepared.plan
    write_text(plan.folder / "study.yaml", to_yaml(prepared.asked))
    runner = StudyRunner(plan, slots, say)
    runner.run()
    return runner.failures


def report_study(prepared: Prepared, failures: Sequence[Failure]) -> tuple[Record, Path]:
    """The record, and the page that shows it."""
    plan = prepared.plan
    record = make_record(plan, prepared.costs, prepared.pairing, [*prepared.failures, *failures])
    drawn: dict[str, tuple[str, Image.Image | None]] = {
        "masks.png": ("Masks of the first samples, the same in all arms; dark is masked.",
                      mask_picture(plan)),
        "filters.png": ("Filters of the first layer after pretraining with the first seed; the "
                        "strongest first, each in its own contrast. Arms whose first layers are "
                        "of one shape began with the same filters.", filter_picture(plan)),
        "reconstructions.png": ("Held-out images: input, masked input, targets decoded, then what "
                                "each arm predicts where masked.", reconstruction_picture(plan)),
    }  # fmt: skip
    pictures = {name: (title, image) for name, (title, image) in drawn.items() if image is not None}
    return record, write_report(record, pictures, plan.folder / "report")
