"""What a run will take: the arithmetic, and the disk of a short run against a whole one."""

import json
from pathlib import Path

import pytest
from commands import ROOT, pretrain

from mimkit.config import Config, load_config
from mimkit.estimate import estimate

DEFAULT = ROOT / "configs" / "default.yaml"


def _config(*words: str) -> Config:
    return load_config(DEFAULT, list(words))


def _folder(path: Path) -> Path:
    """Of a short run that took round numbers."""
    summary = {
        "images_per_second": 128.0, "seconds_to_first_step": 10.0, "steps": 20,
        "seconds": {"evaluate": {"times": 2, "seconds": 8.0}, "draw": {"times": 1, "seconds": 3.0},
                    "save": {"times": 1, "seconds": 0.5},
                    "final_probe": {"times": 1, "seconds": 6.0}},
    }  # fmt: skip
    (path / "checkpoints" / "step-00000020").mkdir(parents=True)
    (path / "checkpoints" / "step-00000020" / "model.safetensors").write_bytes(bytes(1000))
    (path / "pictures").mkdir()
    (path / "pictures" / "step-00000020.png").write_bytes(bytes(100))
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_times_are_multiplied_by_how_often_each_thing_happens(tmp_path: Path) -> None:
    config = _config("output.checkpoint_every=100", "output.picture_every=250",
                     "output.evaluate_every=60", "data.heldout_limit=1024",
                     "probe.train_limit=1024", "probe.heldout_limit=512")  # fmt: skip
    found = estimate(config, _folder(tmp_path), steps=250, peak_bytes=7)
    assert found.step == 0.5  # 64 images at 128 a second
    assert found.parts == {
        "start and first update": 10.0,
        "updates": 249 * 0.5,
        "evaluations": 5 * 4.0 * 2,  # after 60, 120, 180, 240 and 250; twice the images
        "pictures": 3.0,
        "checkpoints": 3 * 0.5,
        "probes": 6.0 * 1.5,
    }
    assert found.seconds == 10 + 124.5 + 40 + 3 + 1.5 + 9
    assert found.images == 16_000


def test_disk_is_what_is_kept_and_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    rest = (folder / "summary.json").stat().st_size
    few = estimate(_config("output.checkpoint_every=250"), folder, steps=250, peak_bytes=7)
    assert few.checkpoint_bytes == 1000
    many = _config("output.checkpoint_every=10", "output.keep_checkpoints=4",
                   "output.keep_every=50", "output.picture_every=25")  # fmt: skip
    found = estimate(many, folder, steps=250, peak_bytes=7)
    assert found.disk_bytes == (4 + 1 + 5) * 1000 + 10 * 100 + rest


def test_the_command_leaves_nothing_and_predicts_the_disk_of_the_run(
    tiny: list[str], finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert pretrain([*tiny, "--estimate", "--estimate-steps", "3"]) == 0
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    assert "estimate of 'default' from 3 updates:" in said
    assert "for 6 updates" in said
    assert "48 views are trained on" in said
    size = float(said.split("a checkpoint has ")[1].split()[0]) * 2**30
    real = sum(file.stat().st_size
               for file in (finished_run / "checkpoints" / "step-00000006").iterdir())  # fmt: skip
    assert size == pytest.approx(real, abs=0.0006 * 2**30)


def test_too_few_steps_are_refused(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain([*tiny, "--estimate", "--estimate-steps", "2"]) == 2
    assert "set 3 or more" in " ".join(capsys.readouterr().err.split())
