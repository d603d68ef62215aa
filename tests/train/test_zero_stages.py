"""What every ZeRO stage must do alike: average weights, leave out an update, go back, resume.

Many groups, frozen parameters and a batch norm, with one and two ranks. The average is compared
with its formula in float64.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from timm.optim import Lamb
from torch import Tensor, nn

from mimkit.ports import free_port
from mimkit.train.average import WeightAverage, decay_at
from mimkit.train.optimizer import set_learning_rate
from mimkit.train.runtimes import RUNTIMES, Runtime, UpdateRule

GLOBAL, STEPS, DECAY = 8, 6, 0.4  # the ramp reaches this decay at update 5


class _Small(nn.Module):
    """Odd sizes, so that the last shards are padded; a frozen layer in the middle."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.first, self.frozen, self.last = nn.Linear(7, 5), nn.Linear(5, 9), nn.Linear(9, 3)
        self.norm = nn.BatchNorm1d(9)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.5)
        self.frozen.requires_grad_(False)

    def forward(self, input_BD: Tensor) -> Tensor:
        hidden_BD: Tensor = self.frozen(torch.tanh(self.first(input_BD)))
        return self.last(torch.relu(self.norm(hidden_BD)))  # type: ignore[no-any-return]


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), eps=1e-8)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """One group each, as layer-wise rates make them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p], "weight_decay": 0.1 * i, "lr_scale": 0.5**i}
            for i, p in enumerate(trained)]  # fmt: skip


def _rule(stage: int, world: int, *, bf16: bool = False) -> UpdateRule:
    return UpdateRule(micro_batch=GLOBAL // world, accumulation=1, clip_grad=1.0, bf16=bf16,
                      zero_stage=stage, deepspeed_config=None)  # fmt: skip


def _prepare(
    runtime: Runtime,
    rule: UpdateRule,
    weights: dict[str, Tensor] | None = None,
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = _adamw,
) -> torch.optim.Optimizer:
    model = _Small()
    if weights is not None:
        model.load_state_dict(weights)
    optimizer = make(_groups(model))
    runtime.prepare(model, optimizer, rule)
    runtime.model.train()
    return optimizer


def _update(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    rule: UpdateRule,
    update: int,
    *,
    bad: float = 0.0,
) -> None:
    """`bad` is added to the last image, so that it is the last rank that has it."""
    draw = torch.Generator().manual_seed(update)
    input_BD = torch.randn(GLOBAL, 7, generator=draw).to(runtime.device)
    input_BD[-1] += bad
    rows = slice(runtime.rank * rule.micro_batch, (runtime.rank + 1) * rule.micro_batch)
    set_learning_rate(optimizer, 1e-2)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * group["lr_scale"]
    runtime.backward(runtime.model(input_BD[rows]).square().mean())


def _averaged(runtime: Runtime, rule: UpdateRule) -> dict[str, Any]:
    """Averages, the weights after each update, and the same again with a stop in the middle."""
    optimizer = _prepare(runtime, rule)
    average = WeightAverage(runtime, decay=DECAY)
    history = [runtime.weights()]
    for update in range(STEPS):
        _update(runtime, optimizer, rule, update)
        average.advance(update)
        history.append(runtime.weights())
        with average.in_place(), torch.no_grad():
            runtime.model.eval()
            inside = runtime.model(torch.ones(2, 7, device=runtime.device))
            runtime.model.train()
    whole = average.whole()
    after = runtime.weights()  # a visit to the averages changes no weight
    moments = runtime.moments()

    optimizer = _prepare(runtime, rule)
    average = WeightAverage(runtime, decay=DECAY)
    for update in range(STEPS):
        if update == 3:
            kept, state, saved = runtime.weights(), runtime.moments(), average.whole()
            optimizer = _prepare(runtime, rule, kept)
            runtime.restore(state, updates=update)
            average = WeightAverage(runtime, decay=DECAY, start=saved)
        _update(runtime, optimizer, rule, update)
        average.advance(update)
    return {"history": history, "average": whole, "inside": inside.cpu(), "after": after,
            "moments": moments, "again": average.whole(), "weights again": runtime.weights(),
            "moments again": runtime.moments()}  # fmt: skip


def _state(runtime: Runtime) -> dict[str, Tensor]:
    return {**runtime.weights(), **runtime.moments()}


def _disturbed(runtime: Runtime, rule: UpdateRule) -> dict[str, Any]:
    """Three updates; the same with bad ones in between; and back to the state after the second."""
    found: dict[str, Any] = {}
    optimizer = _prepare(runtime, rule)
    for update in range(3):
        _update(runtime, optimizer, rule, update)
    found["straight"] = _state(runtime)
    optimizer = _prepare(runtime, rule)
    found["applied"] = []
    for update, bad in ((0, 0.0), (9, math.nan), (1, 0.0), (8, math.inf), (2, 0.0)):
        statistics = [buffer.clone() for buffer in runtime.module.buffers()]
        _update(runtime, optimizer, rule, update, bad=bad)
        found["applied"].append(runtime.applied)
        if not runtime.applied:
            assert not math.isfinite(float(runtime.grad_norm))
            for buffer, kept in zip(runtime.module.buffers(), statistics, strict=True):
                buffer.copy_(kept)
        if update == 1:
            weights, moments = runtime.weights(), runtime.moments()
    found["left out"] = _state(runtime)
    _update(runtime, optimizer, rule, 7)
    found["beyond"] = _state(runtime)
    runtime.go_back(weights)
    runtime.restore(moments, updates=2)
    found["back"], found["second"] = _state(runtime), {**weights, **moments}
    _update(runtime, optimizer, rule, 2)
    found["again"] = _state(runtime)
    return found


def _check_disturbed(found: dict[str, Any], where: str) -> None:
    assert found["applied"] == [True, False, True, False, True], where
    assert _equal(found["left out"], found["straight"]), where
    assert not _equal(found["beyond"], found["straight"]), where
    assert _equal(found["back"], found["second"]), where
    assert _equal(found["again"], found["straight"]), where


def _formula(history: list[dict[str, Tensor]], name: str) -> Tensor:
    average = history[0][name].double()
    for updates, weights in enumerate(history[1:]):
        decay = decay_at(updates, decay=DECAY)
        average = decay * average + (1 - decay) * weights[name].double()
    return average


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def _check(found: dict[str, Any], where: str) -> None:
    history, average = found["history"], found["average"]
    assert average.keys() == history[-1].keys(), where
    for name, value in average.items():
        same = history[-1][name]
        if name.startswith(("frozen", "norm.running", "norm.num")):  # the model's own
            assert torch.equal(value, same), f"{where}: {name}"
            assert name.startswith("norm") or torch.equal(value, history[0][name]), where
            continue
        assert (value - _formula(history, name)).abs().max() < 1e-6, f"{where}: {name}"
        assert (value - same).abs().max() > 1e-4, f"{where}: {name} is no average"
    assert _equal(found["after"], history[-1]), where
    plain = _Small().eval()
    plain.load_state_dict(average)
    assert torch.allclose(found["inside"], plain(torch.ones(2, 7)), atol=1e-6), where
    assert _equal(found["again"], average), f"{where}: resumed"
    assert _equal(found["weights again"], history[-1]), f"{where}: resumed"
    assert _equal(found["moments again"], found["moments"]), f"{where}: resumed"


def test_the_decay_rises_to_what_is_asked_for() -> None:
    assert [decay_at(k, decay=0.5) for k in (0, 1, 8, 100)] == [0.1, 2 / 11, 0.5, 0.5]
    assert decay_at(10**6, decay=0.9999) == 0.9999


def test_plain_pytorch_averages_leaves_out_goes_back_and_resumes_exactly() -> None:
    _check(_averaged(RUNTIMES["local"](), _rule(0, 1)), "local")
    _check_disturbed(_disturbed(RUNTIMES["local"](), _rule(0, 1)), "local")


def _rank(rank: int, world: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    runtime = RUNTIMES["deepspeed"]()
    whole = world > 1 or torch.cuda.is_available()  # one process on a CPU divides nothing
    stages = range(4) if whole else (0, 3)
    found = {stage: _averaged(runtime, _rule(stage, world)) for stage in stages}
    for stage in (1, 3) if whole else (1,):  # where the engine's masters are the weights themselves
        found[f"{stage}, bf16"] = _averaged(runtime, _rule(stage, world, bf16=True))
    torch.save(found, Path(folder) / f"{rank}.pt")
    disturbed = {stage: _disturbed(runtime, _rule(stage, world)) for stage in stages}
    torch.save(disturbed, Path(folder) / f"disturbed-{rank}.pt")
    runtime.close()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_stage_averages_leaves_out_and_goes_back_alike(world: int, tmp_path: Path) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    mp.spawn(_rank, args=(world, free_port(), str(tmp_path)), nprocs=world)
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]
    for rank in range(world):
        disturbed = torch.load(tmp_path / f"disturbed-{rank}.pt", weights_only=True)
        for stage, found in disturbed.items():
            _check_disturbed(found, f"rank {rank} of {world}, stage {stage}")
    for stage, found in of_ranks[0].items():
        if "bf16" not in str(stage):
            _check(found, f"stage {stage}, {world} ranks")
        assert _equal(found["again"], found["average"]), f"{stage}: resumed"
        for other in of_ranks[1:]:
            trained = [n for n in found["average"] if not n.startswith("norm.")]
            assert all(torch.equal(other[stage]["average"][n], found["average"][n])
                       for n in trained), stage  # fmt: skip
    first, *others = (found["average"] for stage, found in of_ranks[0].items()
                      if "bf16" not in str(stage))  # fmt: skip
    for other in others:
        for name in first:
            assert torch.allclose(first[name].float(), other[name].float(), atol=1e-5), name


def _lamb(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return Lamb(groups, lr=0.0)


def test_lamb_resumes_exactly_with_groups_and_frozen_parameters() -> None:
    """It counts updates once a group, where AdamW counts them for every parameter."""
    runtime, rule = RUNTIMES["local"](), _rule(0, 1)
    optimizer = _prepare(runtime, rule, make=_lamb)
    for update in range(STEPS):
        if update == 3:
            kept, moments = runtime.weights(), runtime.moments()
        _update(runtime, optimizer, rule, update)
    straight = runtime.weights()
    optimizer = _prepare(runtime, rule, kept, make=_lamb)
    runtime.restore(moments, updates=3)
    for update in range(3, STEPS):
        _update(runtime, optimizer, rule, update)
    assert _equal(runtime.weights(), straight)
    assert [group["step"] for group in optimizer.param_groups] == [STEPS] * 6
