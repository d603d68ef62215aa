"""Time and disk of a study before it begins, from measured steps and counted weights."""

from dataclasses import dataclass

from mimkit import build
from mimkit.ablation.budgets import ArmCost
from mimkit.ablation.plan import Plan
from mimkit.ablation.runner import tasks_of
from mimkit.train.stopwatch import duration

_OVERHEAD = 1.25  # optimizer, loader and evaluations over forward and backward, measured
_START = 6.0  # seconds of a run besides its steps, on two cores
_STATES = 3  # a checkpoint has the weights and AdamW's two moments, fp32


@dataclass(frozen=True)
class Estimate:
    """Of what is still missing.

    Attributes:
        runs, finished: of the study.
        seconds: None on a GPU, where the first run will tell.
        gigabytes: of checkpoints and token banks.
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
        return f"{self.runs} runs{done}; {time}; {self.gigabytes:.2g} GB of disk"


def estimate(plan: Plan, costs: dict[str, ArmCost], *, cores: int | None) -> Estimate:
    """
    Args:
        cores: that train; None on GPUs.
    """
    study, milliseconds, images_of_banks, gigabytes = plan.study, 0.0, 0, 0.0
    data, heldout = build.build_data(plan.arms[study.reference].data)
    todo = [run for run in plan.runs if tasks_of(study, run)]
    probed = sum(min(limit, len(source)) for limit, source in
                 zip(study.probe_images, (data, heldout or data), strict=True))  # fmt: skip
    for run in todo:
        cost, train = costs[run.arm], run.config.train
        images = build.num_steps(train, data.epoch_length) * train.batch_size
        milliseconds += images * cost.ms_train * _OVERHEAD
        milliseconds += probed * cost.ms_forward if "probes" in study.regimes else 0
        gigabytes += cost.params * 4e-9 * _STATES * run.config.output.keep_checkpoints
        images_of_banks = max(images_of_banks, images)
    grid = build.build_tokenizer(plan.arms[study.reference]).grid(
        *[plan.arms[study.reference].data.token_size] * 2
    )
    banks = {run.config.data.seed_of_views(run.seed) for run in todo}
    gigabytes += 2e-9 * grid[0] * grid[1] * images_of_banks * len(banks)
    seconds = None if cores is None else milliseconds / 1e3 / cores + _START * len(todo)
    finished = len(plan.runs) - len(todo)
    return Estimate(len(plan.runs), finished, seconds, gigabytes)
