"""The loop around a step. It knows no model: batches in, updates out, hooks in between."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mimkit.batch import Batch
from mimkit.errors import UserError, found_by_all
from mimkit.train.bad_samples import NAME as BAD_SAMPLES
from mimkit.train.bad_samples import BadSamples
from mimkit.train.metrics import Meter, Recorder
from mimkit.train.nonfinite import NAME as NONFINITE
from mimkit.train.nonfinite import REMEDY, NonFinite
from mimkit.train.optimizer import set_learning_rate, set_weight_decay
from mimkit.train.runtimes import Runtime
from mimkit.train.spikes import SpikeWatch
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


class Outcome(NamedTuple):
    """What was trained."""

    updates: int  # done in all: fewer than planned where the run was stopped
    rate: float  # images per second, all ranks
    stopped: bool  # whether a rank asked for it


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
    weight_decay: Callable[[int], float] | None = None,
    start: int,
    hooks: Sequence[Hook],
    recorder: Recorder | None,
    after_update: Callable[[int], None] | None = None,
    bad_samples: BadSamples | None = None,
    nonfinite: NonFinite | None = None,
    meter: Meter | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Updates number `start` + 1 to `plan.steps`, or to the one after which a rank says `stop`.

    `after_update` is part of the update (a weight average); hooks are not, and their time does not
    count. Means of the step's sums go to `recorder` (rank 0's) every `plan.log_every` updates and
    before hooks: so a checkpoint is never one of lost weights, and no mean spans a checkpoint,
    which makes the lines after a resume those of an uninterrupted run. `bad_samples` are counted
    with them. Where the run stops in between, `meter` holds what the next line is still to be made
    of; give it back to go on.

    Raises:
        UserError: the loss or the gradient is no longer finite, and `nonfinite` does not allow it;
            too many samples were bad.
    """
    clock = _Clock()
    nonfinite = nonfinite or NonFinite()
    report = _Report(runtime, plan, recorder, bad_samples, nonfinite, meter or Meter())
    with contextlib.ExitStack() as on_error:
        if recorder is not None:  # the bar ends before the error is told
            on_error.callback(recorder.close)
        updates, stopped = start, False
        while updates < plan.steps:
            lr = learning_rate(updates)
            set_learning_rate(optimizer, lr)
            if weight_decay is not None:
                set_weight_decay(optimizer, weight_decay(updates))
            nonfinite.keep_statistics(runtime.module)
            micros = _go_through(runtime, plan, step, batches, updates)
            clock.count(plan.batch_size)
            done = updates + 1
            if runtime.applied:
                report.add(done, micros)
                if after_update is not None:
                    after_update(updates)
            elif (back := nonfinite.settle(done)) < done:
                report.go_back(back)
                updates = back
                continue
            updates = done
            report.advance()
            due = [hook for hook in hooks if done == plan.steps or done % hook.every == 0]
            if due or done in (1, plan.steps) or done % plan.log_every == 0:
                report.write(done, lr=lr, rate=clock.recent_rate())
            _run_hooks(due, done, clock=clock)
            if stopped := runtime.any(stop()):
                break
        on_error.pop_all()
    return Outcome(updates, clock.mean_rate(), stopped)


def _go_through(
    runtime: Runtime,
    plan: Plan,
    step: Callable[[Batch, Moment], StepResult],
    batches: Iterator[Batch],
    updates: int,
) -> list[tuple[Tensor, StepResult]]:
    """One update: forward and backward of its micro-batches; their samples and results."""
    micros = []
    for micro in range(plan.accumulation):
        batch = next(batches).to(runtime.device)
        result = step(batch, _moment(runtime, plan, updates, micro))
        runtime.backward(result.loss)
        micros.append((batch.index_B, StepResult(result.loss.detach(), result.sums)))
    return micros


def _moment(runtime: Runtime, plan: Plan, updates: int, micro: int) -> Moment:
    first = (micro * runtime.world + runtime.rank) * plan.micro_batch
    return Moment(updates, slice(first, first + plan.micro_batch))


def _run_hooks(due: Sequence[Hook], done: int, *, clock: "_Clock") -> None:
    if due:
        clock.pause()
        for hook in due:
            hook.action(done)
        clock.go_on()


class _Report:
    """The lines of metrics: means over ranks and updates, what was bad, which losses jumped."""

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan,
        recorder: Recorder | None,
        bad_samples: BadSamples | None,
        nonfinite: NonFinite,
        meter: Meter,
    ) -> None:
        self._runtime, self._plan, self._recorder = runtime, plan, recorder
        self._bad_samples, self._nonfinite, self._meter = bad_samples, nonfinite, meter
        self._spikes = SpikeWatch()

    def add(self, update: int, micros: Sequence[tuple[Tensor, StepResult]]) -> None:
        for index_B, result in micros:
            self._meter.add(result.sums)
            self._spikes.note(update, result.loss, index_B)

    def advance(self) -> None:
        if self._recorder is not None:
            self._recorder.advance(1)

    def go_back(self, updates: int) -> None:
        """To a checkpoint, which no mean spans."""
        self._meter.clear()
        self._spikes.forget()
        if self._recorder is not None:
            self._recorder.go_back(updates, why=f"{self._nonfinite.total} updates were not finite")

    def write(self, done: int, *, lr: float, rate: float) -> None:
        means = self._means(drawn=done * self._plan.batch_size)
        values = self._finite(means, done)
        values["lr"] = lr
        if rate:  # there is none yet after the first update
            values["images_per_second"] = rate
        if self._nonfinite.policy != "stop":
            values[NONFINITE] = self._nonfinite.total
        if self._recorder is not None:
            self._recorder.write(done, values, kind="train")
        self._tell_spikes()

    def _means(self, *, drawn: int) -> dict[str, float]:
        """The means of all ranks and, where they are counted, the bad samples of the run."""
        if self._bad_samples is None:
            return self._meter.means(self._runtime.sum)
        self._meter.add(self._bad_samples.news(self._runtime.device))
        totals = self._meter.totals(self._runtime.sum)
        news, _ = totals.pop(BAD_SAMPLES)
        self._bad_samples.settle(news, drawn=drawn)
        means = {name: total / count for name, (total, count) in totals.items()}
        return {**means, BAD_SAMPLES: self._bad_samples.total}

    def _finite(self, means: dict[str, float], done: int) -> dict[str, float]:
        """The means and the last gradient's norm, if all are numbers."""
        runtime = self._runtime
        told = runtime.applied and runtime.grad_norm is not None
        values = {**means, **({"grad_norm": float(runtime.grad_norm or 0)} if told else {})}
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise found_by_all(
                f"not finite at update {done}: {', '.join(bad)}; no checkpoint is written of it. "
                f"Start again with {REMEDY}",
                speaks=runtime.rank == 0,
            )
        return values

    def _tell_spikes(self) -> None:
        """Every rank finds the same ones; their samples are asked for only where there are any."""
        if not self._spikes.news:  # none on any rank
            return
        losses = self._runtime.sum(self._spikes.losses()) / self._runtime.world
        for spike in self._spikes.settle(losses.tolist()):
            samples = self._runtime.gather(self._spikes.samples(spike.update))
            if self._recorder is not None:
                self._recorder.spike(spike, [index for rank in samples for index in rank])
        self._spikes.forget()


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
