"""Which kernels a run computes with: chosen once, written down, and kept by what continues it."""

import json
from pathlib import Path

import pytest
from commands import pretrain

from mimkit import kernels
from mimkit.config import load_config
from mimkit.errors import UserError
from mimkit.models.matmul import has_onednn
from mimkit.train import checkpoint

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


def settings(tiny: list[str], folder: Path, *more: str) -> list[str]:
    return [*tiny, f"output.dir={folder}", "data.heldout=null", *more]


def facts(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run.json").read_text())["facts"]


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.fixture
def as_if_twice(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine on which oneDNN is twice as fast; counts the probes."""
    probes: list[int] = []
    monkeypatch.setattr(kernels, "probe_matmul", lambda: probes.append(1) or ("onednn", 2.0))
    return probes


@needs_onednn
def test_onednn_gives_torchs_losses_and_is_written_down(tiny, tmp_path, as_if_twice) -> None:
    fast, plain = tmp_path / "fast", tmp_path / "plain"
    assert pretrain(settings(tiny, fast)) == 0
    assert pretrain(settings(tiny, plain, "engine.matmul=torch")) == 0
    assert len(as_if_twice) == 1
    assert facts(fast)["matmul"] == "onednn" and "matmul" not in facts(plain)
    assert losses(fast) == pytest.approx(losses(plain), rel=1e-4)


@needs_onednn
def test_a_run_goes_on_with_what_it_was_begun_with(tiny, tmp_path, as_if_twice) -> None:
    """To the last bit, and without a second probe; the setting cannot change it on the way."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert pretrain(settings(tiny, whole)) == 0
    assert pretrain(settings(tiny, parts)) == 0
    (parts / "summary.json").unlink()
    last = checkpoint.latest(parts / "checkpoints")
    assert last is not None
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    as_if_twice.clear()
    assert pretrain(settings(tiny, parts, "engine.matmul=torch")) != 0
    assert pretrain(settings(tiny, parts)) == 0
    assert as_if_twice == []
    assert losses(parts) == losses(whole)


def test_in_bf16_there_is_nothing_to_choose(tiny, tmp_path, as_if_twice) -> None:
    run = tmp_path / "run"
    assert pretrain(settings(tiny, run, "engine.precision=bf16", "train.steps=1")) == 0
    assert as_if_twice == [] and "matmul" not in facts(run)


def test_compiled_blocks_and_zero_3_are_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"set engine.zero_stage to 0, 1 or 2"):
        load_config(Path("configs/default.yaml"), ["engine.compile=block", "engine.zero_stage=3"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_blocks_train_to_the_same_losses(tiny, tmp_path) -> None:
    found = []
    for name in ("block", "false"):
        run = tmp_path / name
        words = ["train.steps=2", "engine.matmul=torch", f"engine.compile={name}"]
        assert pretrain(settings(tiny, run, *words)) == 0
        found.append(losses(run))
    assert facts(tmp_path / "block")["compile"] == "block"
    assert found[0] == pytest.approx(found[1], rel=1e-4)
