"""The loop around a step. It knows no model: batches in, updates out, hooks in between."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mimkit.batch import Batch
from mimkit.errors import UserError
from mimkit.train.bad_samples import NAME as BAD_SAMPLES
from mimkit.train.bad_samples import BadSamples
from mimkit.train.metrics import Meter, Recorder
from mimkit.train.optimizer import set_learning_rate
from mimkit.train.runtimes import Runtime
from mimkit.train.step import StepResult


@dataclass(frozen=True)
class Plan:
    """How long a run is and how its global batch is cut."""

    steps: int
    batch_size: int  # global
    micro_batch: int
    accumulation: int
    log_every: int


class Moment(NamedTuple):
    """Where in the run a micro-batch stands: everything its randomness may depend on."""

    updates: int
    rows: slice  # which rows of the global batch it is


class Hook(NamedTuple):
    """Something done after every `every`-th update and after the last one."""

    every: int
    action: Callable[[int], None]  # takes the updates done


def divide_batch(batch_size: int, *, world: int, accumulation: int) -> int:
    """The micro-batch a rank; UserError where the global batch does not divide."""
    share, left = divmod(batch_size, world * accumulation)
    if left or not share:
        unit = world * accumulation
        below, above = batch_size // unit * unit, (batch_size // unit + 1) * unit
        near = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"a global batch of {batch_size} does not divide into {world} ranks x {accumulation} "
            f"accumulated micro-batches; set train.batch_size={near}, or change "
            "engine.accumulation or the number of ranks"
        )
    return share


def train(
    *,
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    step: Callable[[Batch, Moment], StepResult],
    batches: Iterator[Batch],
    plan: Plan,
    learning_rate: Callable[[int], float],
    start: int,
    hooks: Sequence[Hook],
    recorder: Recorder | None,
    after_update: Callable[[int], None] | None = None,
    bad_samples: BadSamples | None = None,
) -> float:
    """Updates number `start` + 1 to `plan.steps`; returns the mean images per second, all ranks.

    `after_update` is part of the update (a weight average); hooks are not, and their time does not
    count. Means of the step's sums go to `recorder` (rank 0's) every `plan.log_every` updates and
    before hooks: so a checkpoint is never one of lost weights, and no mean spans a checkpoint,
    which makes the lines after a resume those of an uninterrupted run. `bad_samples` are counted
    with them.

    Raises:
        UserError: the loss or the gradient is no longer finite; too many samples were bad.
    """
    meter, clock = Meter(), _Clock()
    with contextlib.ExitStack() as on_error:
        if recorder is not None:  # the bar ends before the error is told
            on_error.callback(recorder.close)
        for updates in range(start, plan.steps):
            lr = learning_rate(updates)
            set_learning_rate(optimizer, lr)
            for micro in range(plan.accumulation):
                moment = _moment(runtime, plan, updates, micro)
                result = step(next(batches).to(runtime.device), moment)
                runtime.backward(result.loss)
                meter.add(result.sums)
            done = updates + 1
            if after_update is not None:
                after_update(updates)
            clock.count(plan.batch_size)
            if recorder is not None:
                recorder.advance(1)
            due = [hook for hook in hooks if done == plan.steps or done % hook.every == 0]
            if due or done in (1, plan.steps) or done % plan.log_every == 0:
                means = _means(meter, runtime, bad_samples, drawn=done * plan.batch_size)
                values = _finite(means, runtime, done)
                values["lr"] = lr
                if rate := clock.recent_rate():  # there is none yet after the first update
                    values["images_per_second"] = rate
                if recorder is not None:
                    recorder.write(done, values, kind="train")
            _run_hooks(due, done, clock=clock)
        on_error.pop_all()
    return clock.mean_rate()


def _moment(runtime: Runtime, plan: Plan, updates: int, micro: int) -> Moment:
    first = (micro * runtime.world + runtime.rank) * plan.micro_batch
    return Moment(updates, slice(first, first + plan.micro_batch))


def _means(
    meter: Meter, runtime: Runtime, bad_samples: BadSamples | None, *, drawn: int
) -> dict[str, float]:
    """The means of all ranks and, where they are counted, the bad samples of the run."""
    if bad_samples is None:
        return meter.means(runtime.sum)
    meter.add(bad_samples.news(runtime.device))
    totals = meter.totals(runtime.sum)
    news, _ = totals.pop(BAD_SAMPLES)
    bad_samples.settle(news, drawn=drawn)
    means = {name: total / count for name, (total, count) in totals.items()}
    return {**means, BAD_SAMPLES: bad_samples.total}


def _run_hooks(due: Sequence[Hook], done: int, *, clock: "_Clock") -> None:
    if due:
        clock.pause()
        for hook in due:
            hook.action(done)
        clock.go_on()


def _finite(means: dict[str, float], runtime: Runtime, done: int) -> dict[str, float]:
    """The means and the last gradient's norm, if all are numbers."""
    norm = {} if runtime.grad_norm is None else {"grad_norm": float(runtime.grad_norm)}
    values = {**means, **norm}
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise UserError(
            f"not finite at update {done}: {', '.join(bad)}; no checkpoint is written of it. Start "
            "again with a lower train.lr, a smaller train.clip_grad or engine.precision=fp32 (that "
            "makes another run, in a folder of its own)"
        )
    return values


class _Clock:
    """Images per second over updates only; the first update (start-up costs) counts apart."""

    def __init__(self) -> None:
        self._images = self._recent_images = 0
        self._seconds = 0.0
        self._since = time.perf_counter()
        self._warm = False

    def count(self, images: int) -> None:
        if not self._warm:  # compilation, caches, first touch of memory
            self._warm, self._since = True, time.perf_counter()
            return
        self._recent_images += images

    def recent_rate(self) -> float:
        """Images per second since the last call or pause; 0 before there is anything to tell."""
        images, seconds = self._recent_images, time.perf_counter() - self._since
        self.pause()
        self.go_on()
        return images / seconds if images else 0.0

    def pause(self) -> None:
        self._images += self._recent_images
        if self._recent_images:
            self._seconds += time.perf_counter() - self._since
        self._recent_images = 0

    def go_on(self) -> None:
        self._since = time.perf_counter()

    def mean_rate(self) -> float:
        self.pause()
        return self._images / self._seconds if self._seconds else 0.0
