"""`mimkit bench scaling`: the arithmetic, against numbers that were worked out by hand."""

import json
from pathlib import Path

import pytest

from mimkit.bench.scaling import Figures, bank_gigabytes, exchange_seconds, scale, slowdown
from mimkit.cli import main

A100 = Figures(teraflops=125)


@pytest.mark.parametrize(
    ("figures", "gpus", "rates", "hours"),
    [(A100, 8, (1158, 781), (30.7, 45.6)), (A100, 64, (1158, 781), (3.8, 5.7)),
     (Figures(), 8, (3205, 2161), (11.1, 16.5)), (Figures(), 32, (3205, 2161), (2.8, 4.1))],
)  # fmt: skip
def test_800_epochs_of_vit_b(figures: Figures, gpus: int, rates, hours) -> None:
    """107.98 GFLOP an image, 52.12 more with the tokenizer; 1.025e9 images."""
    run = scale("B", gpus, figures=figures)
    assert (run.images_per_second, run.with_tokenizer) == pytest.approx(rates, rel=1e-3)
    assert (run.hours[800], run.hours_with_tokenizer[800]) == pytest.approx(hours, abs=0.06)


def test_a_global_batch_of_2048_does_not_scale_to_64_gpus() -> None:
    """10 ms of computing against 29 ms of 368 MB at 25 GB/s; within a machine 2 ms against 80."""
    wide, alone = (scale("B", gpus, figures=Figures()) for gpus in (64, 8))
    assert (wide.compute_ms, wide.exchange_ms) == pytest.approx((10.0, 29.0), abs=0.1)
    assert (alone.compute_ms, alone.exchange_ms) == pytest.approx((79.9, 2.1), abs=0.1)
    assert not wide.exchange_hides and alone.exchange_hides
    assert slowdown(alone) == 1 and slowdown(wide) == pytest.approx(1 + (29 - 6.66) / 10, abs=0.02)


def test_a_ring_sends_nearly_everything_twice() -> None:
    figures = Figures(network=10e9)
    assert exchange_seconds(10**9, 16, figures) == pytest.approx(2 * 15 / 16 * 4e9 / 10e9)
    assert exchange_seconds(10**9, 1, figures) == 0


def test_what_a_machine_must_be_given() -> None:
    run = scale("B", 8, figures=Figures(data_seconds=1 / 217))
    assert run.jpeg_gigabytes == pytest.approx(2.8, abs=0.05)
    assert run.cores == pytest.approx(118, abs=1)
    assert bank_gigabytes(800) == pytest.approx(402, abs=0.5)


def test_measured_figures_come_out_of_the_other_benches(tmp_path: Path, capsys) -> None:
    step, data, out = (tmp_path / name for name in ("step.json", "data.json", "out.json"))
    rows = {"plain": {"images_per_second": 1000}, "mimkit": {"images_per_second": 2000}}
    step.write_text(json.dumps({"step_gflop": 100, "precisions": [{"rows": rows}]}))
    data.write_text(json.dumps({"images_per_second_per_core": 500}))
    words = ["--step", str(step), "--data", str(data), "--json", str(out)]
    assert main(["bench", "scaling", *words]) == 0
    found = json.loads(out.read_text())
    assert found["figures"]["teraflops"] == pytest.approx(200)
    assert found["figures"]["data_seconds"] == pytest.approx(0.002)
    assert found["sources"]["teraflops"] == "measured, step.json"
    text = capsys.readouterr().out
    assert "| 200 | measured, step.json |" in text and "| 25 | assumed |" in text


def test_a_file_without_the_figure_is_refused(tmp_path: Path, capsys) -> None:
    path = tmp_path / "step.json"
    path.write_text("{}")
    assert main(["bench", "scaling", "--step", str(path)]) != 0
    assert "no timed steps" in " ".join(capsys.readouterr().err.split())
