"""One study from its configuration to its report."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from mimkit import build, runs
from mimkit.ablation.budgets import ArmCost, arm_costs, steps_of_arms
from mimkit.ablation.classifiers import CLASSIFIERS, classifier_config
from mimkit.ablation.estimates import Estimate, estimate
from mimkit.ablation.machine import Slot
from mimkit.ablation.pages import write_report
from mimkit.ablation.pairing import Pairing, check_pairing
from mimkit.ablation.pictures import filter_picture, mask_picture, reconstruction_picture
from mimkit.ablation.plan import Plan, arm_configs, make_plan, study_folder
from mimkit.ablation.report import Record, make_record
from mimkit.ablation.runner import Failure, StudyRunner
from mimkit.config import Config, StudyConfig, science_hash, to_yaml
from mimkit.errors import UserError
from mimkit.files import write_text

Say = Callable[[str], object]


@dataclass(frozen=True)
class Prepared:
    """Planned and checked; nothing is trained yet."""

    plan: Plan
    costs: dict[str, ArmCost]
    pairing: list[Pairing]
    estimate: Estimate


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
    arms = arm_configs(study, seed=study.seeds[0])
    first_plan = make_plan(study)  # refuses confounds in seconds, before anything is timed
    for run in first_plan.runs[: len(arms)]:
        for regime in CLASSIFIERS:
            if regime in study.regimes:
                classifier_config(study, run, regime)
    costs = _costs(study, first_plan.arms, say)
    reference = first_plan.arms[study.reference]
    length = build.build_data(reference.data)[0].epoch_length
    steps = steps_of_arms(study, arms, costs, steps=build.num_steps(reference.train, length))
    plan = first_plan if steps is None else make_plan(study, steps=steps)
    say("building the first batch and the weights of every arm")
    pairing = check_pairing(plan.arms, reference=study.reference, allowed=_allowed(plan))
    cores = None if slots[0].threads is None else sum(s.threads * s.ranks for s in slots
                                                      if s.threads)  # fmt: skip
    return Prepared(plan, costs, pairing, estimate(plan, costs, cores=cores))


def _costs(study: StudyConfig, arms: dict[str, Config], say: Say) -> dict[str, ArmCost]:
    """Measured once for a study: with a budget of time, steps and so identities depend on it."""
    file = study_folder(study) / "costs.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    length = next(iter(arms.values())).train  # how long it trains changes no cost of a step
    keys = {name: science_hash(config.model_copy(update={"train": length}))
            + "".join(f" {digest}" for digest in build.code_digests(config).values())
            for name, config in arms.items()}  # fmt: skip
    if not all(key in known for key in keys.values()):
        found = arm_costs(arms, say=say)
        known |= {keys[name]: cost.record() for name, cost in found.items()}
        write_text(file, json.dumps(known, indent=1))
    return {name: ArmCost(**known[key]) for name, key in keys.items()}


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
    """Everything that is missing; `study.yaml` in its folder says what was asked for."""
    plan = prepared.plan
    write_text(plan.folder / "study.yaml", to_yaml(plan.study))
    runner = StudyRunner(plan, slots, say)
    runner.run()
    return runner.failures


def report_study(prepared: Prepared, failures: Sequence[Failure]) -> tuple[Record, Path]:
    """The record, and the page that shows it."""
    plan = prepared.plan
    record = make_record(plan, prepared.costs, prepared.pairing, failures)
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
