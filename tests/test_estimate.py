"""What a run will take: the arithmetic, and the disk of a short run against a whole one."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from commands import ROOT, finetune, pretrain

from mimkit.config import Config, load_config, load_finetune_config
from mimkit.estimate import Length, estimate, size
from mimkit.train import checkpoint
from mimkit.train.checkpoint import left_over, most_at_once

DEFAULT = ROOT / "configs" / "default.yaml"


def _config(*words: str) -> Config:
    return load_config(DEFAULT, list(words))


def _folder(path: Path) -> Path:
    """Of a short run that took round numbers."""
    summary = {
        "images_per_second": 40.0, "seconds_to_first_step": 10.0, "steps": 20,
        "peak_memory_mib": 7, "knn_top1": 0.5, "patches": 64, "masked_patches": 24,
        "seconds": {"evaluate": {"times": 2, "seconds": 8.0}, "draw": {"times": 1, "seconds": 3.0},
                    "save": {"times": 2, "seconds": 9.5},
                    "mean_losses": {"times": 1, "seconds": 4.0},
                    "final_probe": {"times": 1, "seconds": 6.0}},
    }  # fmt: skip
    saved = {"kind": "checkpoint", "seconds": 2.0, "stalled_seconds": 0.5}
    rates = [{"kind": "train", "images_per_second": rate} for rate in (10.0, 128.0, 130.0)]
    lines = [*rates, saved, {**saved, "stalled_seconds": 9.0}]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
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
    found = estimate(config, _folder(tmp_path), Length(steps=250, train=2000, judged=800))
    assert found.step == 0.5  # 64 images at 128 a second, the median: once it took long
    assert found.parts == {
        "start and first update": 10.0,
        "updates": 249 * 0.5,
        # after 60, 120, 180, 240 and 250; of 800 images, for there are no 1024, and not of 512
        "evaluations": 5 * 4.0 * 800 / 512,
        "losses of means": 4.0 * 800 / 512,
        "pictures": 3.0,
        "checkpoints": 3 * 0.5 + 2.0,  # the last one is waited for
        "probes": 6.0 * 1.5,
    }
    assert found.seconds == sum(found.parts.values())
    assert (found.images, found.patches, found.predicted) == (16_000, 1_024_000, 384_000)
    pixels = 3 * 512 * 32 * 32 * 3 * 4  # of 512 images more than in the short run, and two copies
    assert found.peak_bytes == 7 * 2**20 + (0 if torch.cuda.is_available() else pixels)


def test_checkpoints_that_come_faster_than_they_are_written_are_waited_for(tmp_path: Path) -> None:
    config = _config("output.checkpoint_every=2")
    found = estimate(config, _folder(tmp_path), Length(steps=10, train=2000, judged=800))
    assert found.parts["checkpoints"] == 5 * (0.5 + 2.0 - 2 * 0.5) + 2.0


def test_a_finetuning_judges_all_and_tests_once(tmp_path: Path) -> None:
    words = ["init=nowhere", "train.epochs=null", "train.steps=100", "train.batch_size=64",
             "output.evaluate_every=25", "output.checkpoint_every=50"]  # fmt: skip
    config = load_finetune_config(ROOT / "configs" / "finetune_small.yaml", words)
    folder = _folder(tmp_path)
    (folder / "best").mkdir()
    (folder / "best" / "model.safetensors").write_bytes(bytes(700))
    summary = json.loads((folder / "summary.json").read_text())
    summary["seconds"]["test"] = {"times": 1, "seconds": 11.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    found = estimate(config, folder, Length(steps=100, train=2000, judged=800))
    assert found.parts == {"start and first update": 10.0, "updates": 99 * 0.5,
                           "evaluations": 4 * 4.0, "checkpoints": 2 * 0.5 + 2.0,
                           "test": 11.0}  # fmt: skip
    few = estimate(config.model_copy(update={"output": config.output.model_copy(
        update={"evaluate_every": 100})}), folder, Length(100, 2000, 800))  # fmt: skip
    lines = (folder / "metrics.jsonl").stat().st_size * 3 // 5
    assert found.disk_bytes - few.disk_bytes == pytest.approx(700 + lines, abs=2)


def test_disk_is_what_is_kept_and_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    rest, lines = ((folder / name).stat().st_size for name in ("summary.json", "metrics.jsonl"))
    length = Length(steps=250, train=2000, judged=800)
    few = estimate(_config("output.checkpoint_every=250"), folder, length)
    assert few.checkpoint_bytes == 1000
    # one checkpoint, one picture, and 25 + 2 + 1 + 1 lines where the short run had 5
    assert few.disk_bytes == 1000 + 2 * 100 + rest + lines * 29 // 5
    many = _config("output.checkpoint_every=10", "output.keep_checkpoints=4",
                   "output.keep_every=50", "output.picture_every=25")  # fmt: skip
    found = estimate(many, folder, length)
    # 210 to 250, and 50, 100, 150 and 200 for good, while 250 is written
    assert found.disk_bytes == (5 + 4) * 1000 + 10 * 100 + rest + lines * (25 + 2 + 25 + 1) // 5


def _told(said: str, what: str) -> float:
    """MiB, out of what the command says."""
    found = re.search(rf"{what} +([\d.]+) MiB", said)
    assert found is not None, said
    return float(found[1])


def test_the_command_leaves_nothing_and_predicts_the_disk_of_the_run(
    tiny: list[str], finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = ["output.tensorboard=true", "--estimate", "--estimate-steps", "3"]
    assert pretrain([*tiny, *words]) == 0
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    assert "estimate of 'default' from 3 updates:" in said
    assert "for 6 updates" in said
    assert "48 views of 16 patches: 768, of which 288 are predicted" in said
    real = size(finished_run / "checkpoints" / "step-00000006") / 2**20
    assert _told(said, "a checkpoint has") == pytest.approx(real, abs=0.06)
    fullest = size(finished_run) / 2**20 + real  # two are kept while a third one is written
    assert _told(said, "disk") == pytest.approx(fullest, rel=0.02)


def test_a_finetuning_is_predicted_too(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    kept = ("data.train=", "data.heldout=", "data.cache_dir=", "data.image_size=", "engine.",
            "encoder.size=", "encoder.depth=", "encoder.patch_size=", "train.steps=",
            "train.batch_size=", "output.")  # fmt: skip
    words = ["init=null", "stem=linear", "train.epochs=null", "data.augment=null",
             *(word for word in tiny if word.startswith(kept) and "picture" not in word),
             "output.evaluate_every=6", "output.log_every=2"]  # fmt: skip
    assert finetune([*words, "--estimate", "--estimate-steps", "3"]) == 0
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    assert "48 views of 16 patches: 768\n" in said
    assert finetune([*words, "output.dir=run"]) == 0
    real = size(tmp_path / "run" / "checkpoints" / "step-00000006") / 2**20
    assert _told(said, "a checkpoint has") == pytest.approx(real, abs=0.06)
    assert _told(said, "disk") == pytest.approx(size(tmp_path / "run") / 2**20 + real, rel=0.02)


@pytest.mark.parametrize(
    ("updates", "keep", "keep_every", "most"),
    [
        (range(10, 101, 10), 2, None, 3),
        ([250], 2, None, 1),  # nothing is there yet
        ([125, 250], 2, None, 2),
        (range(10, 101, 10), 3, 50, 5),  # 50, and 70, 80, 90 while 100 is written
        (range(10, 101, 10), 1, 10, 10),
    ],
)
def test_checkpoints_at_once_are_as_many_as_saving_leaves(
    updates: Sequence[int], keep: int, keep_every: int | None, most: int, tmp_path: Path
) -> None:
    assert most_at_once(updates, keep=keep, keep_every=keep_every) == most
    there = 0
    for done in updates:
        there = max(there, checkpoint.count(tmp_path) + 1)
        state = checkpoint.Checkpoint(done, done, {"a": torch.zeros(1)}, {"a": torch.zeros(1)})
        checkpoint.save(tmp_path, state, keep=keep, keep_every=keep_every)
    assert there == most
    assert left_over(updates, keep=keep, keep_every=keep_every) == checkpoint.count(tmp_path)


def test_too_few_steps_are_refused(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain([*tiny, "--estimate", "--estimate-steps", "2"]) == 2
    assert "set 3 or more" in " ".join(capsys.readouterr().err.split())
