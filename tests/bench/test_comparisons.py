"""The small benches: what they count is known, what they time is reported, and all are run."""

import json
from pathlib import Path

import pytest
import torch

from mimkit.bench.comparison import Comparison, parameter_bytes
from mimkit.bench.finetune import ATTENTION, FFN, FULL, measure_finetune
from mimkit.bench.optimizer import FOREACH, LOOP, OURS, measure_optimizer
from mimkit.bench.parallel import BRANCHES, FUSED, SEQUENTIAL, measure_parallel
from mimkit.bench.workload import make_model
from mimkit.cli import _bench, main
from mimkit.cli._bench._comparison_report import as_text
from mimkit.cli._bench.all import ORDER
from mimkit.cli._folder import sub_verbs

CPU = torch.device("cpu")


def test_ratios_are_within_rounds() -> None:
    found = Comparison("title", "a", 2, {"a": [1.0, 2.0, 4.0], "b": [2.0, 2.0, 2.0]})
    assert found.time_ratio("b") == (1.0, 0.5, 2.0)
    assert found.milliseconds("a") == (1000.0, 500.0, 2000.0)
    text = as_text([found])
    assert "title" in text and "1.000 (0.500 to 2.000)" in text


def test_the_optimizers_arrive_at_the_same_weights() -> None:
    """`measure_optimizer` refuses to report otherwise."""
    found = measure_optimizer("Ti", device=CPU, rounds=2)
    assert set(found.seconds) == {LOOP, FOREACH, OURS}
    million = sum(p.numel() for p in make_model("Ti", device="meta").parameters()) / 1e6
    assert found.title.startswith(f"one update of the {million:.1f} M parameters")


def test_what_trains_has_a_gradient_and_two_moments() -> None:
    layer = torch.nn.Linear(10, 3)
    layer.bias.requires_grad_(False)
    assert parameter_bytes(layer, copies=3) == 3 * 4 * 30


@pytest.mark.slow
def test_a_part_trains_its_share_and_saves_less() -> None:
    found = measure_finetune("Ti", batch=1, bf16=False, device=CPU, rounds=1)
    saved, state = found.columns["saved MiB"], found.columns["state MiB"]
    # of a block's 12 D^2 weights 4 are attention's and 8 the MLP's; the head's 1000 D train too
    everything, head = 12 * 12 * 192**2, 1000 * 192
    for way, squares in ((ATTENTION, 4), (FFN, 8)):
        assert saved[way] < 0.8 * saved[FULL]
        expected = (12 * squares * 192**2 + head) / (everything + 768 * 192 + head)
        assert state[way] / state[FULL] == pytest.approx(expected, rel=0.03)


def test_parallel_blocks_are_timed_in_three_ways() -> None:
    (found,) = measure_parallel("Ti", batches=[1], bf16=False, device=CPU, rounds=1)
    assert list(found.seconds) == [SEQUENTIAL, BRANCHES, FUSED]
    assert "12 blocks in a row, or 6 of 2 branches" in found.title


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys) -> None:
    path = tmp_path / "optimizer.json"
    words = ["bench", "optimizer", "--size", "Ti", "--rounds", "1", "--json", str(path)]
    assert main(words) == 0
    (found,) = json.loads(path.read_text())["comparisons"]
    ratio = found["time_ratio"][OURS]["median"]
    assert f"{ratio:.3f} (" in capsys.readouterr().out
    assert main(["bench", "optimizer", "--rounds", "0"]) != 0
    assert "--rounds is 0; expected more than 0" in capsys.readouterr().err


def test_all_is_every_measurement_that_needs_no_settings() -> None:
    assert {*ORDER} == {*sub_verbs(_bench)} - {"all", "engine", "scaling"}
