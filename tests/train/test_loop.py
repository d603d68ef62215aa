"""The loop: what happens after which update, what is refused, and what a hook may count on."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from mimkit.batch import Batch
from mimkit.errors import UserError
from mimkit.train.loop import Hook, Moment, Plan, divide_batch, train
from mimkit.train.optimizer import make_optimizer, set_learning_rate
from mimkit.train.runtimes import RUNTIMES, Runtime, UpdateRule
from mimkit.train.step import StepResult


@pytest.mark.parametrize(
    ("batch_size", "world", "accumulation", "share"),
    [(8, 1, 1, 8), (8, 2, 1, 4), (8, 2, 2, 2), (2048, 16, 4, 32), (3, 3, 1, 1)],
)
def test_a_batch_is_divided(batch_size: int, world: int, accumulation: int, share: int) -> None:
    assert divide_batch(batch_size, world=world, accumulation=accumulation) == share


@pytest.mark.parametrize(
    ("batch_size", "world", "accumulation", "near"),
    [(8, 3, 1, "6 or 9"), (64, 3, 1, "63 or 66"), (8, 2, 3, "6 or 12"), (2, 3, 1, "=3,"),
     (1, 1, 2, "=2,")],
)  # fmt: skip
def test_a_batch_that_does_not_divide_names_the_nearest_that_do(
    batch_size: int, world: int, accumulation: int, near: str
) -> None:
    with pytest.raises(UserError) as caught:
        divide_batch(batch_size, world=world, accumulation=accumulation)
    message = str(caught.value)
    assert f"global batch of {batch_size} does not divide into {world} ranks" in message
    assert near in message
    assert "engine.accumulation" in message


class _Recorder:
    """Notes what a real one would write."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.advanced = log, 0

    def advance(self, updates: int) -> None:
        self.advanced += updates

    def close(self) -> None:
        self.log.append(("closed", self.advanced))

    def write(self, step: int, values: dict[str, float], *, kind: str) -> None:
        self.log.append(("line", step, values["loss"]))


class _Run:
    """A model of one number, whose loss at update k (from 0) is `losses[k]` times that number."""

    def __init__(self, losses: list[float], *, accumulation: int = 1) -> None:
        self.losses, self.accumulation, self.log = losses, accumulation, list[Any]()
        self.moments: list[Moment] = []
        self.runtime: Runtime = RUNTIMES["local"]()
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.optimizer = make_optimizer(self.model, decays=lambda *_: False, weight_decay=0.0,
                                        betas=(0.9, 0.999), eps=1e-8)  # fmt: skip
        self.runtime.prepare(self.model, self.optimizer, UpdateRule(
            micro_batch=4, accumulation=accumulation, clip_grad=0.0, bf16=False, zero_stage=0,
            deepspeed_config=None))  # fmt: skip
        self.recorder = _Recorder(self.log)

    def _batches(self) -> Iterator[Batch]:
        while True:
            yield Batch(*(torch.zeros(4, dtype=torch.uint8) for _ in range(5)))

    def _step(self, batch: Batch, moment: Moment) -> StepResult:
        self.moments.append(moment)
        loss = self.model.weight.sum() * self.losses[moment.updates]
        return StepResult(loss, {"loss": (loss * 4, 4)})

    def __call__(self, *, start: int = 0, log_every: int = 1, hooks: tuple[Hook, ...] = ()) -> None:
        steps = len(self.losses)
        train(
            runtime=self.runtime, optimizer=self.optimizer, step=self._step,
            batches=self._batches(), start=start, hooks=hooks, learning_rate=lambda k: 0.0,
            plan=Plan(steps, 4 * self.accumulation, 4, self.accumulation, log_every),
            recorder=self.recorder,  # type: ignore[arg-type]
            after_update=lambda k: self.log.append(("after", k)),
        )  # fmt: skip

    def hook(self, every: int, name: str) -> Hook:
        return Hook(every, lambda done: self.log.append((name, done)))


def _lines(log: list[Any]) -> list[tuple[int, float]]:
    return [(step, value) for what, step, *values in log if what == "line" for value in values]


def test_hooks_come_after_their_updates_and_after_the_last_one() -> None:
    run = _Run([1.0] * 7)
    run(hooks=(run.hook(3, "a"), run.hook(2, "b")))
    log = [entry[:2] for entry in run.log if entry[0] in ("a", "b")]
    assert log == [("b", 2), ("a", 3), ("b", 4), ("a", 6), ("b", 6), ("a", 7), ("b", 7)]
    assert run.recorder.advanced == 7


def test_what_belongs_to_an_update_comes_before_its_line_and_its_hooks() -> None:
    run = _Run([1.0, 2.0])
    run(hooks=(run.hook(1, "hook"),))
    assert [entry[:2] for entry in run.log] == [
        ("after", 0), ("line", 1), ("hook", 1), ("after", 1), ("line", 2), ("hook", 2),
    ]  # fmt: skip


def test_lines_are_means_since_the_line_before() -> None:
    run = _Run([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    run(log_every=3)
    assert _lines(run.log) == [(1, 1.0), (3, 2.5), (6, 5.0), (7, 7.0)]


@pytest.mark.parametrize("every", [2, 3, 4])
def test_lines_after_a_resume_are_those_of_the_uninterrupted_run(every: int) -> None:
    losses = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    whole = _Run(losses)
    whole(log_every=3, hooks=(whole.hook(every, "save"),))
    for start in range(every, len(losses), every):  # from each checkpoint
        resumed = _Run(losses)
        resumed(start=start, log_every=3, hooks=(resumed.hook(every, "save"),))
        assert _lines(resumed.log) == [line for line in _lines(whole.log) if line[0] > start]


def test_accumulated_micro_batches_are_the_rows_of_the_global_batch() -> None:
    run = _Run([1.0, 1.0], accumulation=2)
    run()
    assert run.moments == [Moment(0, slice(0, 4)), Moment(0, slice(4, 8)),
                           Moment(1, slice(0, 4)), Moment(1, slice(4, 8))]  # fmt: skip


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(bad: float) -> None:
    """Also between two lines: a checkpoint is never one of lost weights."""
    run = _Run([1.0, 1.0, 1.0, bad, 1.0, 1.0])
    with pytest.raises(UserError, match=r"not finite at update 4: grad_norm.*lower train\.lr"):
        run(log_every=100, hooks=(run.hook(2, "save"),))
    assert [entry for entry in run.log if entry[0] == "save"] == [("save", 2)]
    assert run.log[-1] == ("closed", 3)  # so that the message does not stand above the bar


def test_a_gradient_that_is_not_finite_stops_the_run() -> None:
    run = _Run([1.0, 1.0])
    run.model.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(UserError, match="not finite at update 1: grad_norm"):
        run(hooks=(run.hook(1, "save"),))
    assert ("save", 1) not in run.log


def test_the_learning_rate_reaches_every_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = make_optimizer(model, decays=lambda name, _: name.endswith("weight"),
                               weight_decay=0.05, betas=(0.9, 0.98), eps=1e-6)  # fmt: skip
    set_learning_rate(optimizer, 0.25)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
        (0.25, 0.05, 2), (0.25, 0.0, 2),
    ]  # fmt: skip


def test_a_parameter_that_is_not_contiguous_is_named() -> None:
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(torch.zeros(2, 3).t())
    with pytest.raises(ValueError, match="weight is not contiguous"):
        make_optimizer(model, decays=lambda *_: True, weight_decay=0.0, betas=(0.9, 0.9), eps=1e-8)
