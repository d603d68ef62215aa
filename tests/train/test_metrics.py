"""Means over steps and ranks, and a metrics file that a resumed run continues."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mimkit.train.metrics import Meter, Recorder


def _alone(tensor: Tensor) -> Tensor:
    return tensor


def test_means_are_weighted_by_counts_and_then_forgotten() -> None:
    meter = Meter()
    meter.add({"loss": (torch.tensor(6.0), 3), "accuracy": (torch.tensor(1), 3)})
    meter.add({"loss": (torch.tensor(10.0), 1), "accuracy": (torch.tensor(1), 1)})
    assert meter.means(_alone) == {"accuracy": 0.5, "loss": 4.0}
    assert meter.means(_alone) == {}


def test_ranks_with_different_counts_get_the_mean_over_all() -> None:
    """One exchange of sums and counts; the other rank has 1 thing of sum 9."""
    meter, exchanged = Meter(), []

    def sum_over_ranks(sums: Tensor) -> Tensor:
        exchanged.append(sums.shape)
        return sums + torch.tensor([[9.0], [1.0]]).double()

    meter.add({"loss": (torch.tensor(6.0), 4)})
    assert meter.means(sum_over_ranks) == {"loss": 3.0}
    assert exchanged == [(2, 1)]


def test_many_small_numbers_are_summed_in_double() -> None:
    meter = Meter()
    meter.add({"loss": (torch.tensor(2.0**24), 1)})
    for _ in range(100):  # in float32 each of them is lost
        meter.add({"loss": (torch.tensor(1.0), 1)})
    assert meter.means(_alone)["loss"] * 101 == 2**24 + 100


def test_gradients_are_not_kept_alive() -> None:
    meter, loss = Meter(), torch.ones((), requires_grad=True) * 2
    meter.add({"loss": (loss, 1)})
    assert meter._sums["loss"].requires_grad is False


def _lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _record(folder: Path, start: int, steps: range) -> None:
    recorder = Recorder(folder, start=start, steps=10, tensorboard=False)
    for step in steps:
        recorder.advance(1)
        recorder.write(step, {"loss": step / 8}, kind="train")
    recorder.close()


def test_a_line_is_a_step_a_kind_and_numbers(tmp_path: Path) -> None:
    _record(tmp_path, 0, range(1, 4))
    assert _lines(tmp_path) == [
        {"step": step, "kind": "train", "loss": step / 8} for step in (1, 2, 3)
    ]


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    value = math.pi * 1e-7
    recorder = Recorder(tmp_path, start=0, steps=1, tensorboard=False)
    recorder.write(1, {"loss": value}, kind="heldout")
    recorder.close()
    assert _lines(tmp_path)[0]["loss"] == value


@pytest.mark.parametrize("torn", ["", '{"step": 7, "ki', "\0\0\0\0", '{"step": '])
def test_a_resumed_run_goes_on_after_its_checkpoint(torn: str, tmp_path: Path) -> None:
    """Lines after update 4 are of updates that are done again; a torn one is no line."""
    _record(tmp_path, 0, range(1, 7))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    _record(tmp_path, 4, range(5, 11))
    assert [line["step"] for line in _lines(tmp_path)] == [*range(1, 11)]


def test_tensorboard_gets_the_numbers_that_the_lines_have(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = Recorder(tmp_path, start=0, steps=2, tensorboard=True)
    for step in (1, 2):
        recorder.write(step, {"loss": step / 8}, kind="train")
    recorder.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.125), (2, 0.25)]


def test_a_run_that_only_misses_its_end_has_no_measurement_twice(tmp_path: Path) -> None:
    """It measures again, because the summary's numbers were lost with the process."""
    recorder = Recorder(tmp_path, start=0, steps=2, tensorboard=False)
    for step in (1, 2):
        for kind in ("train", "heldout", "checkpoint"):
            recorder.write(step, {"loss": 0.5}, kind=kind)
    recorder.close()
    Recorder(tmp_path, start=2, steps=2, tensorboard=False).close()
    assert [(line["step"], line["kind"]) for line in _lines(tmp_path)] == [
        (1, "train"), (1, "heldout"), (1, "checkpoint"), (2, "train"), (2, "checkpoint"),
    ]  # fmt: skip
