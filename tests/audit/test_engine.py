"""The engine audit: what it calls equal, what it catches, and what it leaves behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import ROOT, command
from torch import Tensor

from mimkit.audit.engine import Trace, compare
from mimkit.audit.engine_runs import batch_size, write_configs
from mimkit.config import Config, load_config
from mimkit.errors import UserError

DEFAULT = ROOT / "configs" / "default.yaml"
LR, STEPS, BETA2 = 1e-3, 4, 0.999
NAMES = ("layer.0.weight", "layer.0.bias", "layer.1.running_mean")


def _trace(losses: list[float] | None = None, **moved: Tensor) -> Trace:
    """Weights of zero except for what is moved; the bias has a gradient of rounding noise."""
    weights = {name: torch.zeros(8) for name in NAMES} | {
        name.replace("_x_", "."): value for name, value in moved.items()
    }
    squares = {"layer.0.weight": 1.0, "layer.0.bias": 1e-14}
    moments = {f"{name}/exp_avg_sq": torch.full((8,), square * (1 - BETA2**STEPS))
               for name, square in squares.items()}  # fmt: skip
    return Trace(losses or [3.0, 2.0, 1.5, 1.0], [1.0] * STEPS, [LR] * STEPS, weights, moments)


def _parity(other: Trace, precision: str = "fp32") -> Any:
    return compare(_trace(), other, precision=precision, beta2=BETA2)


def test_equal_trainings_are_equal() -> None:
    parity = _parity(_trace())
    assert parity.equal
    assert (parity.loss_difference, parity.worst.steps, parity.norm_difference) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("precision", "gap", "equal"), [
    ("fp32", 9e-6, True), ("fp32", 2e-5, False), ("bf16", 2e-2, True), ("bf16", 4e-2, False),
])  # fmt: skip
def test_losses_are_held_to_the_tolerance_of_the_precision(
    precision: str, gap: float, equal: bool
) -> None:
    parity = _parity(_trace([3.0, 2.0 + gap, 1.5, 1.0]), precision)
    assert parity.loss_difference == pytest.approx(gap)
    assert parity.equal == equal


def test_weights_are_measured_by_the_way_that_adamw_can_go() -> None:
    gone = torch.zeros(8)
    gone[3] = 0.5 * LR * STEPS
    parity = _parity(_trace(layer_x_0_x_weight=gone))
    assert parity.worst.name == "layer.0.weight"
    assert parity.worst.steps == pytest.approx(0.5)
    assert not parity.equal


def test_what_has_noise_for_a_gradient_may_go_anywhere_and_takes_a_running_mean_along() -> None:
    parity = _parity(_trace(layer_x_0_x_bias=torch.full((8,), LR * STEPS),
                            layer_x_1_x_running_mean=torch.full((8,), LR * STEPS)))  # fmt: skip
    assert parity.equal
    assert {one.name: one.noise for one in parity.tensors} == {
        "layer.0.weight": 0, "layer.0.bias": 8, "layer.1.running_mean": 8,
    }  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_equal(bad: float) -> None:
    assert not _parity(_trace([3.0, bad, 1.5, 1.0])).equal
    broken = _parity(_trace(layer_x_0_x_weight=torch.full((8,), bad)))
    assert broken.worst.name == "layer.0.weight"
    assert not broken.equal


def test_trainings_of_other_kinds_are_refused() -> None:
    with pytest.raises(UserError, match="4 and 3 updates"):
        _parity(_trace([3.0, 2.0, 1.5]))


def _config(*words: str) -> Config:
    return load_config(DEFAULT, [*words, "engine.runtime=deepspeed"])


def test_the_batch_is_small_divides_and_is_never_larger_than_the_users() -> None:
    assert batch_size(_config("train.batch_size=2048", "engine.accumulation=2"), ranks=4) == 64
    assert batch_size(_config("train.batch_size=12"), ranks=4) == 12
    with pytest.raises(UserError, match="does not fill 4 ranks"):
        batch_size(_config("train.batch_size=3"), ranks=4)


def test_the_two_configurations_differ_in_the_engine_only(tmp_path: Path) -> None:
    json_file = tmp_path / "ds.json"
    json_file.write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 3}}))
    folder = tmp_path / "audit"
    folder.mkdir()
    config = _config("engine.zero_stage=3", f"engine.deepspeed_config={json_file}")
    plain, theirs = write_configs(config, folder, steps=7, ranks=2, batch=None)
    one, other = (load_config(path).model_dump() for path in (plain, theirs))
    assert one.pop("engine")["runtime"] == "local"
    engine = other.pop("engine")
    assert (engine["runtime"], engine["zero_stage"]) == ("deepspeed", 3)
    passed_on = json.loads(Path(engine["deepspeed_config"]).read_text())
    assert passed_on == {"zero_optimization": {"stage": 3}}  # its batch is not the audit's
    assert one["output"].pop("dir") != other["output"].pop("dir")
    assert one == other
    assert (one["train"]["steps"], one["train"]["batch_size"]) == (7, 16)
    assert yaml.safe_load(plain.read_text())["data"]["heldout"] is None


@pytest.mark.slow
def test_as_a_command_it_finds_two_ranks_equal_and_a_batch_norm_split_in_two_different(
    tiny: list[str], tmp_path: Path
) -> None:
    """A batch norm over each of two accumulated micro-batches is another one."""
    words = [ROOT / "tools" / "audit.py", "engine", *tiny, "engine.runtime=deepspeed",
             "--steps", "4", "--json", "engine.json"]  # fmt: skip
    same = command([*words, "engine.zero_stage=3", "stem=linear"], cwd=tmp_path)
    assert same.code == 0, same.err
    found = json.loads((tmp_path / "engine.json").read_text())
    assert found["loss_difference"] <= 1e-5
    assert len(found["losses"]) == 4
    assert {"stem.project.weight", "head.bias"} <= {one["name"] for one in found["tensors"]}
    assert "equal" in same.out

    other = command([*words, "engine.accumulation=2", "--ranks", "1"], cwd=tmp_path)
    assert other.code == 1, other.err
    assert "losses:  differ by at most" in other.out
    assert "DIFFERENT" in other.out
    assert "a batch norm normalises by one micro-batch" in " ".join(other.out.split())
    assert [path.name for path in tmp_path.iterdir()] == ["engine.json"]
