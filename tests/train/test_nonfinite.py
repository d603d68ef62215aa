"""Updates that are not made, losses that jump, and stopping in the middle of a line."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from mimkit.batch import Batch
from mimkit.errors import ToldByAnotherError, UserError
from mimkit.train.loop import Hook, Moment, Outcome, Plan, train
from mimkit.train.metrics import Meter
from mimkit.train.nonfinite import NonFinite
from mimkit.train.optimizer import make_optimizer
from mimkit.train.runtimes import RUNTIMES, Runtime, UpdateRule
from mimkit.train.spikes import Spike, SpikeWatch
from mimkit.train.step import StepResult


class _Recorder:
    """Notes what a real one would write."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.spikes: list[tuple[Spike, list[int]]] = []
        self.back: list[int] = []
        self.advanced = 0

    def advance(self, updates: int) -> None:
        self.advanced += updates

    def close(self) -> None:
        pass

    def write(self, step: int, values: dict[str, float], *, kind: str) -> None:
        self.lines.append({"step": step, **values})

    def spike(self, spike: Spike, samples: list[int]) -> None:
        self.spikes.append((spike, samples))

    def go_back(self, updates: int, *, why: str) -> None:
        self.back.append(updates)
        self.lines = [line for line in self.lines if line["step"] <= updates]


class _Run:
    """A linear model behind a batch norm; the k-th batch (from 0) is scaled by `scales[k]`."""

    def __init__(self, scales: Sequence[float]) -> None:
        torch.manual_seed(0)
        self.scales = scales
        self.model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.runtime: Runtime = RUNTIMES["local"]()
        self.optimizer = make_optimizer(self.model, decays=lambda *_: True, weight_decay=0.1,
                                        betas=(0.9, 0.999), eps=1e-8)  # fmt: skip
        self.runtime.prepare(self.model, self.optimizer, UpdateRule(
            micro_batch=4, accumulation=1, clip_grad=0.0, bf16=False, zero_stage=0,
            deepspeed_config=None))  # fmt: skip
        self.recorder = _Recorder()
        self.saved: dict[int, Any] = {}
        self.taken = 0

    def batches(self) -> Iterator[Batch]:
        while True:
            self.taken += 1
            index_B = torch.arange(4 * (self.taken - 1), 4 * self.taken)
            empty = [torch.zeros(4, dtype=torch.uint8) for _ in range(5)]
            yield Batch(*empty)._replace(index_B=index_B)

    def step(self, batch: Batch, moment: Moment) -> StepResult:
        number = int(batch.index_B[0]) // 4
        draw = torch.Generator().manual_seed(number)
        output_B1 = self.model(torch.randn(4, 3, generator=draw))
        loss = (output_B1 - 1).square().mean() * self.scales[number]
        return StepResult(loss, {"loss": (loss.detach() * 4, 4)})

    def save(self, done: int) -> None:
        self.saved[done] = self.runtime.weights(), self.runtime.moments()

    def go_back(self, done: int) -> int:
        newest = max(self.saved)
        weights, moments = self.saved[newest]
        self.runtime.go_back(weights)
        self.runtime.restore(moments, updates=newest)
        return newest

    def __call__(
        self, nonfinite: NonFinite, *, steps: int, log_every: int = 1, **named: Any
    ) -> Outcome:
        return train(
            runtime=self.runtime, optimizer=self.optimizer, step=self.step,
            batches=self.batches(), start=0, hooks=[Hook(2, self.save)],
            learning_rate=lambda k: 0.05, plan=Plan(steps, 4, 4, 1, log_every),
            recorder=self.recorder,  # type: ignore[arg-type]
            nonfinite=nonfinite, **named,
        )  # fmt: skip


def _equal(one: Any, other: Any) -> bool:
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
               for a, b in zip(one, other, strict=True))  # fmt: skip


def _without(scales: list[float], bad: int) -> list[float]:
    return [scale for number, scale in enumerate(scales) if number != bad]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_update_leaves_no_trace_but_its_count(bad: float) -> None:
    """Weights, moments and batch norm as if the batch had been without effect: here, lr is one."""
    run = _Run([1.0, 1.0, bad, 1.0, 1.0])
    told: list[int] = []
    run(NonFinite(policy="skip", allowed=1, told=lambda: told.append(1)), steps=5)
    other = _Run([1.0, 1.0, 1.0, 1.0])
    draws = iter([0, 1, 3, 4])
    other.batches = lambda: (  # type: ignore[method-assign]
        Batch(*(torch.zeros(4, dtype=torch.uint8) for _ in range(5)))._replace(
            index_B=torch.arange(4 * n, 4 * n + 4)) for n in draws)  # fmt: skip
    other.scales = [1.0] * 5
    other(NonFinite(), steps=4)
    assert _equal([run.runtime.weights(), run.runtime.moments()],
                  [other.runtime.weights(), other.runtime.moments()])  # fmt: skip
    assert [line["nonfinite_updates"] for line in run.recorder.lines] == [0, 0, 1, 1, 1]
    assert "loss" not in run.recorder.lines[2] and "grad_norm" not in run.recorder.lines[2]
    assert "loss" in run.recorder.lines[3]
    assert (run.recorder.advanced, told) == (5, [1])


def test_going_back_takes_the_checkpoint_and_the_next_samples() -> None:
    run = _Run([1.0] * 3 + [math.nan] + [1.0] * 9)
    outcome = run(NonFinite(policy="rollback", allowed=1, go_back=run.go_back), steps=6)
    assert outcome.updates == 6
    assert run.recorder.back == [2]  # the fourth batch failed in update 4, after the save at 2
    assert run.taken == 8  # six updates, and two of them twice
    assert [line["step"] for line in run.recorder.lines] == [1, 2, 3, 4, 5, 6]
    assert run.recorder.lines[-1]["nonfinite_updates"] == 1


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_more_than_are_allowed_stop_the_run(policy: Any) -> None:
    run = _Run([1.0, 1.0, 1.0, math.nan, math.nan, math.nan] + [1.0] * 9)
    nonfinite = NonFinite(policy=policy, allowed=2, go_back=run.go_back)
    with pytest.raises(UserError, match=r"3 updates were not finite.*train\.max_nonfinite=2"):
        run(nonfinite, steps=9)


def test_one_rank_tells_and_the_others_know() -> None:
    with pytest.raises(ToldByAnotherError):
        _Run([math.nan])(NonFinite(speaks=False), steps=1)
    with pytest.raises(UserError, match=r"update 1: grad_norm.*train\.on_nonfinite=skip"):
        _Run([math.nan])(NonFinite(), steps=1)


def test_a_line_that_was_begun_before_a_stop_is_ended_after_it() -> None:
    scales = [1.0, 2.0, 0.5, 1.5, 1.0, 1.0]
    whole = _Run(scales)
    whole(NonFinite(), steps=6, log_every=5)
    for stop_after in (2, 3, 4):
        part, meter = _Run(scales), Meter()
        asked = iter([False] * (stop_after - 1) + [True])
        outcome = part(NonFinite(), steps=6, log_every=5, meter=meter, stop=lambda a=asked: next(a))
        assert (outcome.updates, outcome.stopped) == (stop_after, True)
        again = Meter()
        again.put_back(meter.pending(), torch.device("cpu"))
        rest = _Run(scales)
        rest.runtime.go_back(part.runtime.weights())
        rest.runtime.restore(part.runtime.moments(), updates=stop_after)
        rest.taken = stop_after
        train(
            runtime=rest.runtime, optimizer=rest.optimizer, step=rest.step,
            batches=rest.batches(), start=stop_after, hooks=[Hook(2, rest.save)],
            learning_rate=lambda k: 0.05, plan=Plan(6, 4, 4, 1, 5), meter=again,
            recorder=rest.recorder,  # type: ignore[arg-type]
        )  # fmt: skip
        lines = [(line["step"], line["loss"]) for line in whole.recorder.lines]
        assert [(line["step"], line["loss"]) for line in rest.recorder.lines] == [
            line for line in lines if line[0] > stop_after
        ]


def _spikes(losses: Sequence[float]) -> list[Spike]:
    watch = SpikeWatch()
    for update, loss in enumerate(losses, 1):
        watch.note(update, torch.tensor(loss), torch.arange(2) + update)
    return watch.settle(watch.losses().tolist())


def test_a_jump_is_found_and_noise_and_a_slope_are_not() -> None:
    draw = torch.Generator().manual_seed(0)
    noise = (3 + torch.randn(300, generator=draw, dtype=torch.float64) * 0.1).tolist()
    assert _spikes(noise) == []
    assert _spikes([5 * 0.99**k for k in range(300)]) == []
    assert _spikes([2.0] * 50 + [2.01]) == []
    (spike,) = _spikes([*noise[:200], 6.0, *noise[200:]])
    assert (spike.update, spike.loss) == (201, 6.0)
    assert spike.median == pytest.approx(3, abs=0.05)
    assert _spikes([9.0, 1.0, 9.0, 1.0, 500.0]) == []  # too early to know


def test_the_samples_of_a_jump_are_logged_with_it() -> None:
    run = _Run([1.0] * 40 + [1e4] + [1.0] * 9)
    run(NonFinite(), steps=50, log_every=7)
    spikes = {spike.update: samples for spike, samples in run.recorder.spikes}
    assert spikes[41] == [160, 161, 162, 163]
    assert min(spikes) == 41
