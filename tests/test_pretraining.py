"""Pretraining from end to end, on photographs: what a run leaves, and what does not change it."""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import ROOT, Shards, command, environment, pretrain
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mimkit import load_encoder, pretraining, tokenizer_training
from mimkit.cli import main
from mimkit.config import (
    Config,
    DvaeConfig,
    Section,
    VqkdConfig,
    load_config,
    load_tokenizer_config,
    science_hash,
)
from mimkit.data.sources.shards import ShardSource
from mimkit.data.writer import Item, write_shard
from mimkit.errors import UserError
from mimkit.tokenizers._dvae_file import load_dvae, save_dvae
from mimkit.train import checkpoint

DEFAULT = ROOT / "configs" / "default.yaml"
NUMBERS = {"steps", "heldout_loss", "unigram_entropy", "ln_vocab", "knn_top1",
           "knn_top1_untrained"}  # fmt: skip
TIMES = {"images_per_second", "seconds_to_first_step"}


def _run(folder: Path, words: list[str]) -> Path:
    """A whole run in this process."""
    assert pretrain([*words, f"output.dir={folder}"]) == 0
    return folder


def _metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def _losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in _metrics(run)]


def _summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def _last(run: Path) -> checkpoint.Checkpoint:
    path = checkpoint.latest(run / "checkpoints")
    assert path is not None
    return checkpoint.load(path)


def _assert_bit_equal(one: Path, other: Path) -> None:
    assert _losses(one) == _losses(other)
    first, second = _last(one), _last(other)
    assert (first.updates, first.position) == (second.updates, second.position)
    for ours, theirs in ((first.weights, second.weights), (first.moments, second.moments)):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def _assert_close(one: Path, other: Path, tolerance: float) -> None:
    steps, losses = zip(*_losses(one), strict=True)
    others, expected = zip(*_losses(other), strict=True)
    assert steps == others
    assert losses == pytest.approx(expected, abs=tolerance)


def _assert_same_end(one: Path, other: Path) -> None:
    assert _summary(one)["heldout_loss"] == pytest.approx(_summary(other)["heldout_loss"], abs=1e-4)
    assert _last(one).weights.keys() == _last(other).weights.keys()


def test_the_summary_has_what_the_issue_names_and_the_numbers_fit_together(
    finished_run: Path,
) -> None:
    summary = _summary(finished_run)
    assert summary.keys() >= NUMBERS | TIMES
    assert summary["steps"] == 6
    assert summary["ln_vocab"] == pytest.approx(math.log(64))
    assert 0 < summary["unigram_entropy"] < summary["ln_vocab"]
    assert summary["unigram_entropy"] < summary["position_loss"] < summary["ln_vocab"] + 0.5
    assert summary["heldout_loss"] == _metrics(finished_run, "heldout")[-1]["heldout_loss"]
    assert summary["knn_chance"] == 0.25
    assert all(0 <= summary[name] <= 1 for name in ("knn_top1", "knn_top1_untrained"))
    assert summary["images_per_second"] > 0
    assert summary["seconds_to_first_step"] > 0
    assert summary["substituted_samples"] == 0


def test_the_loss_falls(finished_run: Path) -> None:
    losses = dict(_losses(finished_run))
    assert losses[1] == pytest.approx(math.log(64), abs=0.3)
    assert losses[6] < losses[1] - 0.5


def test_latest_is_the_newest_run(finished_run: Path) -> None:
    link = finished_run.parent / "latest"
    assert link.is_symlink()
    assert link.resolve() == finished_run
    assert finished_run.name == "default-001"


def test_metrics_have_every_step_and_tensorboard_the_same(finished_run: Path) -> None:
    train = _metrics(finished_run)
    assert [line["step"] for line in train] == [1, 2, 3, 4, 5, 6]
    assert all({"loss", "accuracy", "lr", "grad_norm"} <= line.keys() for line in train)
    assert [line["step"] for line in _metrics(finished_run, "heldout")] == [3, 6]
    events = EventAccumulator(str(finished_run / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        [line["loss"] for line in train]
    )


def test_pictures_have_eight_rows_of_four(finished_run: Path) -> None:
    pictures = sorted(path.name for path in (finished_run / "pictures").iterdir())
    assert pictures == ["step-00000003.png", "step-00000006.png"]
    with Image.open(finished_run / "pictures" / pictures[0]) as picture:
        assert picture.size == (4 * (128 + 4), 14 + 8 * (128 + 4))
        assert len(picture.convert("L").getcolors() or range(257)) > 100


def test_the_tokenizer_was_measured_before_the_first_update(finished_run: Path) -> None:
    summary = _summary(finished_run)
    health = json.loads((finished_run / "audits" / "tokenizer.json").read_text())
    words = health["words"]
    assert (health["tokenizer"], health["images"], health["grid"]) == ("dvae", 32, [4, 4])
    assert (words["num_tokens"], words["vocabulary"]) == (32 * 16, 64)
    assert summary["tokenizer_used"] == words["codes_used"] > 10
    assert summary["tokenizer_entropy"] == words["entropy"] > 1
    assert summary["tokenizer_agreement"] == health["same_crop"]["right"]
    assert summary["tokenizer_stable_shift"] == health["stable_shift"]
    with Image.open(finished_run / "audits" / "tokenizer.png") as picture:
        assert picture.size == (3 * (128 + 4), 14 + 8 * (128 + 4))


def test_a_dead_tokenizer_stops_the_run_before_its_first_update(
    tiny: list[str], tokenizer_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One word wins everywhere, as after pixels were mapped twice."""
    dvae, _ = load_dvae(tokenizer_file)
    with torch.no_grad():
        dvae.encoder.blocks.output.conv.b[3] += 1e4
    save_dvae(tmp_path / "dead.safetensors", dvae, settings={}, half=True)
    words = [*tiny, f"tokenizer.path={tmp_path / 'dead.safetensors'}"]
    assert pretrain([*words, f"output.dir={tmp_path / 'run'}"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "tokenizer 'dvae' gives nearly the same target everywhere" in message
    assert "one word takes 100.0% of 512 patches of 32 views" in message
    assert "set tokenizer.name and tokenizer.path" in message
    assert not (tmp_path / "run").exists()  # a start that is refused leaves nothing


def test_what_repeats_the_run_lies_in_its_folder(finished_run: Path) -> None:
    config = load_config(finished_run / "config.yaml")
    start = json.loads((finished_run / "run.json").read_text())
    assert start["science"] == science_hash(config)
    assert start["versions"]["torch"] == torch.__version__.split("+")[0]
    assert len(start["facts"]["tokenizer"]) == 64
    assert start["facts"]["train_digest"] != start["facts"]["heldout_digest"]
    assert json.loads((finished_run / "engine.json").read_text())["runtime"] == "local"
    left = [path for path in finished_run.rglob("*") if path.name.endswith(".tmp")]
    assert left == []


def test_another_folder_and_loader_processes_change_no_bit(
    finished_run: Path, tiny: list[str], tmp_path: Path
) -> None:
    other = _run(tmp_path / "elsewhere", [*tiny, "engine.workers=2"])
    _assert_bit_equal(finished_run, other)
    ours, theirs = _summary(other), _summary(finished_run)
    assert {k: ours[k] for k in NUMBERS} == {k: theirs[k] for k in NUMBERS}


def test_another_seed_changes_the_losses(
    finished_run: Path, tiny: list[str], tmp_path: Path
) -> None:
    other = _run(tmp_path / "other", [*tiny, "seed=1"])
    assert all(a != b for a, b in zip(_losses(finished_run), _losses(other), strict=True))


def test_deepspeed_equals_plain_pytorch(
    finished_run: Path, tiny: list[str], tmp_path: Path
) -> None:
    """In one process, without a launcher, ZeRO stage 1."""
    words = [*tiny, "engine.runtime=deepspeed", "engine.zero_stage=1", "output.dir=run"]
    ended = command([ROOT / "tools" / "pretrain.py", *words], cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "Next: mimkit export run" in ended.out
    _assert_close(tmp_path / "run", finished_run, 1e-5)
    assert _summary(tmp_path / "run")["heldout_loss"] == pytest.approx(
        _summary(finished_run)["heldout_loss"], abs=1e-4
    )


def test_accumulated_micro_batches_give_the_same_losses(tiny: list[str], tmp_path: Path) -> None:
    """For stems without batch statistics; drop path is drawn for the global batch."""
    words = [*tiny, "stem=linear"]
    whole = _run(tmp_path / "whole", words)
    halves = _run(tmp_path / "halves", [*words, "engine.accumulation=2"])
    _assert_close(halves, whole, 1e-4)


LONG = ["train.steps=30", "output.log_every=3", "output.checkpoint_every=4",
        "output.evaluate_every=10", "output.picture_every=30"]  # fmt: skip


@pytest.fixture
def stopped(tiny: list[str], tmp_path: Path) -> Iterator[tuple[Path, "subprocess.Popen[bytes]"]]:
    """The folder of a longer run, and its process, stopped somewhere after a random update."""
    run, after = tmp_path / "run", random.randint(5, 22)
    words = [*tiny, *LONG, "engine.workers=1", f"output.dir={run}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mimkit", "pretrain", *words], cwd=tmp_path, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        limit = time.monotonic() + 60
        while not (run / "metrics.jsonl").exists() or (_whole_lines(run) or [0])[-1] < after:
            assert process.poll() is None, "it ended before it could be stopped"
            assert time.monotonic() < limit
            time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
        yield run, process
    finally:
        process.kill()
        process.wait()


def _whole_lines(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line)["step"] for line in lines]


def test_killed_and_continued_equals_uninterrupted_bit_for_bit(
    stopped: tuple[Path, "subprocess.Popen[bytes]"], tiny: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With drop path, a stem with BatchNorm, and another number of loader processes.

    Before the kill a second process is refused; right after it the first one's loader process may
    still be alive, which must not hold the folder.
    """
    run, process = stopped
    words = [*tiny, *LONG, "engine.workers=0", f"output.dir={run}"]
    assert pretrain(words) == 2
    assert f"another process is training in {run}" in " ".join(capsys.readouterr().err.split())
    process.kill()
    process.wait()
    assert not (run / "summary.json").exists()
    newest = checkpoint.latest(run / "checkpoints")
    assert newest is not None
    assert pretrain(words) == 0
    assert f"continuing from {newest}" in capsys.readouterr().out
    whole = _run(tmp_path / "whole", [*tiny, *LONG, "engine.workers=2"])
    _assert_bit_equal(run, whole)
    assert _metrics(run, "heldout") == _metrics(whole, "heldout")
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name[0] == "."] == []


def test_an_average_of_the_weights_is_kept_judged_exported_and_resumed_exactly(
    finished_run: Path, tiny: list[str], tmp_path: Path
) -> None:
    """It changes no training; after six updates it is not far from the weights."""
    words = [*tiny, "train.ema=0.5"]
    whole = _run(tmp_path / "whole", words)
    assert _losses(whole) == _losses(finished_run)
    last = _last(whole)
    assert last.average is not None and last.average.keys() == last.weights.keys()
    moved = (last.average["head.weight"] - last.weights["head.weight"]).abs().max()
    assert 1e-5 < moved < 0.1
    judged = [_metrics(run, "heldout")[-1]["heldout_loss"] for run in (whole, finished_run)]
    assert judged[0] != judged[1] and judged[0] == pytest.approx(judged[1], abs=0.5)
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    _without_its_end(part, last=6)
    _run(part, words)
    _assert_bit_equal(whole, part)
    again = _last(part).average
    assert again is not None and all(torch.equal(again[n], last.average[n]) for n in again)
    for which, weights in (("best", last.average), ("trained", last.weights)):
        out = tmp_path / f"{which}.safetensors"
        assert main(["export", str(whole), str(out), "--format", "safetensors",
                     "--weights", which]) == 0  # fmt: skip
        state = load_encoder(out).image_encoder.state_dict()
        assert state and all(torch.equal(state[n], weights[n]) for n in state), which
    assert main(["export", str(finished_run), str(tmp_path / "none"), "--weights", "average"]) == 2


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_saves_and_leaves_and_the_same_command_goes_on(
    number: signal.Signals, code: int, finished_run: Path, tiny: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In update 5, between two checkpoints and two lines; a picture and an evaluation are due."""
    words = [*tiny, "output.log_every=4", f"output.dir={tmp_path}"]
    step, count = pretraining.mim_step, itertools.count(1)

    def signalled(*arguments: Any, **named: Any) -> Any:
        if next(count) == 5:
            os.kill(os.getpid(), number)
        return step(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "mim_step", signalled)
        assert pretrain(words) == code
    said = " ".join(capsys.readouterr().err.split())
    assert f"stopped by {number.name}: saved after update 5 of 6 in {tmp_path}" in said
    assert "the same command continues" in said and "Traceback" not in said
    assert checkpoint.latest(tmp_path / "checkpoints") == tmp_path / "checkpoints/step-00000005"
    assert pretrain(words) == 0
    assert "update 5 of 6, sample 40" in capsys.readouterr().out
    one, other = _last(tmp_path), _last(finished_run)
    assert all(torch.equal(one.weights[n], other.weights[n]) for n in one.weights)
    assert all(torch.equal(one.moments[n], other.moments[n]) for n in one.moments)
    assert _metrics(tmp_path, "heldout") == _metrics(finished_run, "heldout")


def test_a_damaged_checkpoint_is_passed_over_and_the_space_is_asked_for_first(
    finished_run: Path, tiny: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "summary.json").unlink()
    file = run / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    words = [*tiny, "engine.workers=1", f"output.dir={run}"]
    free = shutil.disk_usage(run)._replace(free=2**20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: free)
        assert pretrain(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(
        r"up to 3 checkpoints of \d+ MiB at once, and needs \d+ MiB, but only 1 MiB", said
    )
    assert pretrain(words) == 0
    said = capsys.readouterr().out
    assert "update 4 of 6, sample 32" in said
    assert f"  passed over: {file} is damaged: " in said
    assert "change no number of it: engine.workers: 0 -> 1" in said
    _assert_bit_equal(run, finished_run)


def test_the_same_command_continues_without_naming_the_folder(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unfinished run of the same science is found by itself; a finished one is left alone."""
    words = [*tiny, f"output.runs_dir={tmp_path}", "data.heldout=null"]
    assert pretrain(words) == 0
    first = tmp_path / "default-001"
    assert "knn_skipped" in _summary(first)
    (first / "summary.json").unlink()  # stopped between the last update and the summary
    capsys.readouterr()
    assert pretrain([*words, "output.log_every=2"]) == 0
    assert "update 6 of 6" in capsys.readouterr().out
    assert _summary(first)["steps"] == 6
    assert [line["step"] for line in _metrics(first)] == [1, 2, 3, 4, 5, 6]
    before = (first / "metrics.jsonl").read_bytes()
    assert pretrain(words) == 0
    assert (first / "metrics.jsonl").read_bytes() == before
    assert _losses(tmp_path / "default-002") == _losses(first)
    assert (tmp_path / "latest").resolve() == tmp_path / "default-002"


def test_a_finished_run_says_so_and_stays_as_it_is(
    tiny: list[str], tmp_path: Path, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*") if path.is_file()}
    assert pretrain([*tiny, f"output.dir={finished_run}"]) == 0
    assert "is finished already" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*") if path.is_file()}
    assert after == before


def test_the_folder_of_another_run_is_refused_and_what_differs_is_named(
    tiny: list[str], finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny, "seed=5", "stem=linear", f"output.dir={finished_run}"]
    assert pretrain(words) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "seed: 0 -> 5" in message
    assert "stem.name: 'hmlp' -> 'linear'" in message
    assert "train.lr" not in message


def _settings(kind: type[Section]) -> Iterator[tuple[str, str]]:
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _settings(field.annotation)
        else:
            yield kind.__name__, name


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Names of the settings that are asked for from now on, by their section's class."""
    asked = set[tuple[str, str]]()
    plain = Section.__getattribute__

    def spy(self: Section, name: str) -> Any:
        kind = type(self)
        if name == "model_dump" and kind not in (Config, DvaeConfig, VqkdConfig):
            asked.update((kind.__name__, field) for field in kind.model_fields)
        for base in kind.__mro__:
            asked.add((base.__name__, name))
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", spy, raising=False)
    return asked


def test_a_pretraining_reads_every_setting(
    tiny: list[str], tmp_path: Path, read: set[tuple[str, str]]
) -> None:
    """No accepted setting is without effect: what nothing reads can have none."""
    words = [*tiny, f"output.runs_dir={tmp_path}", "train.steps=null", "train.epochs=0.25",
             "probe.every=3"]  # fmt: skip
    config = load_config(DEFAULT, words)
    read.clear()
    with mock.patch("torch.cuda.is_available", return_value=False):
        pretraining.run(config, started_at=time.time())
    assert set(_settings(Config)) - read == set()


ENCODERS_VIEW = {"image_size": "64", "image_interpolation": "bilinear", "mean": "[0, 0, 0]",
                 "std": "[1, 1, 1]"}  # fmt: skip


def test_a_tokenizers_training_reads_every_setting(
    tiny: list[str], tmp_path: Path, read: set[tuple[str, str]]
) -> None:
    kept = ("data.train", "data.heldout", "data.cache_dir", "data.token_size", "engine.", "output.")
    words = [word for word in tiny if word.startswith(kept)]
    config = load_tokenizer_config(ROOT / "configs" / "tokenizer.yaml", [
        *words, f"output.runs_dir={tmp_path}", "train.steps=null", "train.epochs=0.25",
        "train.batch_size=8", "model.width=16", "model.vocabulary=32",
    ])  # fmt: skip
    read.clear()
    with mock.patch("torch.cuda.is_available", return_value=False):
        tokenizer_training.run(config, started_at=time.time())
    view = {("DataConfig", name) for name in ENCODERS_VIEW}
    view |= {("EngineConfig", "matmul")}  # torch multiplies here, which both of its values allow
    assert set(_settings(DvaeConfig)) - read <= view


@pytest.mark.parametrize("name", ENCODERS_VIEW)
def test_a_tokenizers_training_refuses_settings_of_the_encoders_view(name: str) -> None:
    override = f"data.{name}={ENCODERS_VIEW[name]}"
    with pytest.raises(UserError, match=rf"data\.{name} does nothing here"):
        load_tokenizer_config(ROOT / "configs" / "tokenizer.yaml", [override])


def _launch(launcher: list[str], words: list[str], folder: Path) -> None:
    ended = command([*launcher, str(ROOT / "tools" / "pretrain.py"), *words], cwd=folder)
    assert ended.code == 0, ended.out[-3000:] + ended.err[-3000:]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
DEEPSPEED = ["-m", "deepspeed.launcher.runner", "--num_accelerators=2", "--master_port=29731"]


@pytest.mark.slow
def test_two_ranks_equal_one(finished_run: Path, tiny: list[str], tmp_path: Path) -> None:
    """BatchNorm's statistics are those of the global batch."""
    words = [*tiny, "engine.runtime=deepspeed", "engine.zero_stage=1", "output.dir=run"]
    _launch(DEEPSPEED, words, tmp_path)
    _assert_close(tmp_path / "run", finished_run, 1e-5)
    _assert_same_end(tmp_path / "run", finished_run)


@pytest.mark.slow
def test_a_run_of_one_process_is_continued_by_two_ranks(
    finished_run: Path, tiny: list[str], tmp_path: Path
) -> None:
    """Plain PyTorch wrote the checkpoint, ZeRO stage 3 on two ranks goes on from it."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    _without_its_end(run, last=6)
    words = [*tiny, "engine.runtime=deepspeed", "engine.zero_stage=3", "output.dir=run"]
    _launch(TORCHRUN, words, tmp_path)
    assert [step for step, _ in _losses(run)] == [1, 2, 3, 4, 5, 6]
    _assert_close(run, finished_run, 1e-5)
    _assert_same_end(run, finished_run)


@pytest.mark.parametrize(
    "words",
    [
        ["stem=hmlp", "stem.statistics=frozen", "mask_at=before_stem", "mask_at.filler=mean"],
        ["stem=levit", "stem.statistics=visible", "mask_at=dilated", "mask.num_masked=3"],
        ["stem=local", "encoder.size=Ti1x2", "encoder.depth=null", "mask=blockwise_wrapped"],
    ],
)
def test_other_placements_and_statistics_run_and_resume_exactly(
    tiny: list[str], tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """From the checkpoint at update 4 of 6, as if the run had been killed in the last update."""
    words = [
        word for word in (*tiny, *words) if word != "encoder.depth=1" or "x2" not in str(words)
    ]
    whole = _run(tmp_path / "whole", words)
    said = capsys.readouterr().out
    assert "tokenizer: 32 training views use" in said
    assert "leak: on four images of noise" in said
    assert "by position" in said
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    (part / "summary.json").unlink()
    shutil.rmtree(part / "checkpoints" / "step-00000006")
    _run(part, words)
    assert "update 4 of 6" in capsys.readouterr().out
    _assert_bit_equal(whole, part)
    summary = _summary(whole)
    assert {k: summary[k] for k in NUMBERS} == {k: _summary(part)[k] for k in NUMBERS}
    leaks = json.loads((whole / "audits" / "leak.json").read_text())
    assert [leak["mode"] for leak in leaks] == ["eval", "train"]
    assert summary["leak_train_visible_moved"] == leaks[1]["visible_moved"]
    leaky = "stem=local" in words  # after the stem, which overlaps
    assert (leaks[1]["visible_moved"] > 0) == (leaks[0]["visible_moved"] > 0) == leaky
    frozen = "stem.statistics=frozen" in words
    statistics = [name for name in _last(whole).weights if name.endswith("running_mean")]
    assert bool(statistics) == ("stem=local" not in words)
    if frozen:  # measured before the first update, and never again
        first = checkpoint.load(whole / "checkpoints" / "step-00000004").weights
        assert all(torch.equal(first[n], _last(whole).weights[n]) for n in statistics)
        assert all(_last(whole).weights[n].abs().sum() > 0 for n in statistics)


def test_a_placement_that_leaves_nothing_visible_is_refused(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny, "stem=levit", "mask_at=dilated", "mask.num_masked=14"]
    assert pretrain([*words, f"output.dir={tmp_path / 'run'}"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "mask.num_masked=14 of 4x4 patches and a stem that sees 7 pixels" in message
    assert not (tmp_path / "run").exists()


def _without_its_end(run: Path, *, last: int) -> None:
    """As if it had been killed after the checkpoint before the one at update `last`."""
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / f"step-{last:08d}")


def test_another_version_of_a_decoder_is_named_when_a_run_goes_on(
    finished_run: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pixels are not equal across all versions, so a resumed run may not be; it goes on."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    _without_its_end(run, last=6)
    start = json.loads((run / "run.json").read_text())
    assert start["versions"].keys() >= {"torch", "torchvision", "pillow", "simplejpeg", "numba"}
    now = start["versions"]["pillow"]
    start["versions"] |= {"pillow": "1.0", "simplejpeg": "0.1"}
    (run / "run.json").write_text(json.dumps(start))
    capsys.readouterr()
    _run(run, tiny)
    said = capsys.readouterr().out
    assert "warning: since this run began, what differs is: " in said
    assert f"pillow: '1.0' -> '{now}'; simplejpeg: '0.1' -> " in said
    assert "torch:" not in said
    _assert_bit_equal(run, finished_run)


def test_sets_subsets_and_a_held_out_part_are_trained_on_and_resumed_exactly(
    finished_run: Path, tiny: list[str], shards: Shards, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Two sets of 32 and 64 images, a quarter held out, half of the rest, one set 2.5 times."""
    sets = (f"[{{shards: {shards.train}/train-00000.tar, weight: 2.5}}, "
            f"{{shards: '{shards.train}/train-0000[12].tar'}}]")  # fmt: skip
    words = [*tiny, f"data.train={sets}", "data.heldout=null", "data.heldout_fraction=0.25",
             "data.subset=0.5", "data.stratified=true"]  # fmt: skip
    whole = _run(tmp_path / "whole", words)
    said = capsys.readouterr().out
    found = re.search(r"(\d+) images, (\d+) an epoch", said)
    assert found is not None
    images, length = map(int, found.groups())
    assert 26 < images < 46 and images < length < 2.5 * images
    facts = json.loads((whole / "run.json").read_text())["facts"]
    plain = json.loads((finished_run / "run.json").read_text())["facts"]
    assert facts["train_digest"] != plain["train_digest"]
    assert facts["heldout_digest"] not in (None, plain["heldout_digest"], facts["train_digest"])
    assert _summary(whole)["knn_heldout_images"] + 2 * images == pytest.approx(96, abs=2)
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    _without_its_end(part, last=6)
    _run(part, words)
    assert "update 4 of 6" in capsys.readouterr().out
    _assert_bit_equal(whole, part)
    other = [*words[:-1], "data.subset_seed=1", f"output.dir={part}"]
    (part / "summary.json").unlink()
    assert pretrain(other) == 2
    assert "data.subset_seed: 0 -> 1" in capsys.readouterr().err


def _with_bad_images(shards: Shards, folder: Path, *, num: int) -> Path:
    """The training images, in one tar, with the first `num` of them cut."""
    source = ShardSource(shards=str(shards.train))
    samples = [source[i] for i in range(len(source))]
    folder.mkdir()
    items = [Item(s.key, s.image if s.index >= num else s.image[:300], "jpg", s.label)
             for s in samples]  # fmt: skip
    write_shard(folder / "train-00000.tar", items, split="train")
    return folder


SUBSTITUTE = ["data.on_bad_sample=substitute", "train.steps=24", "output.log_every=5",
              "output.checkpoint_every=12", "output.evaluate_every=24",
              "output.picture_every=24"]  # fmt: skip


def test_bad_samples_are_counted_over_a_resume(
    tiny: list[str], shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """3 of 96, in two epochs of 12 updates."""
    bad = _with_bad_images(shards, tmp_path / "bad", num=3)
    words = [*tiny, *SUBSTITUTE, f"data.train={bad}"]
    whole = _run(tmp_path / "whole", words)
    said = capsys.readouterr().err
    for key in range(3):
        named = f"warning: the next sample stands in for sample {key}, key 'train_{key:03d}', in "
        assert said.count(named) == 2
    counts = {line["step"]: line["substituted_samples"] for line in _metrics(whole)}
    assert list(counts) == [1, 5, 10, 12, 15, 20, 24]
    assert sorted(counts.values()) == list(counts.values())
    assert (counts[12], counts[24]) == (3, 6)
    assert _summary(whole)["substituted_samples"] == 6
    assert _last(whole).bad_samples == 6
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    _without_its_end(part, last=24)
    _run(part, [*words, "engine.workers=1"])
    assert "update 12 of 24" in capsys.readouterr().out
    assert _last(part).bad_samples == _summary(part)["substituted_samples"] == 6
    assert {line["step"]: line["substituted_samples"] for line in _metrics(part)} == counts
    _assert_bit_equal(whole, part)


def test_too_many_bad_samples_stop_a_run_which_goes_on_when_more_are_allowed(
    tiny: list[str], shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """14 of 96; ten are never too many."""
    bad = _with_bad_images(shards, tmp_path / "bad", num=14)
    words = [*tiny, *SUBSTITUTE, "output.checkpoint_every=4", "output.log_every=1",
             f"data.train={bad}", f"output.dir={tmp_path / 'run'}"]  # fmt: skip
    assert pretrain(words) == 2
    lines = _metrics(tmp_path / "run")
    found = re.search(r"(\d+) of the (\d+) samples drawn so far could not be decoded",
                      message := " ".join(capsys.readouterr().err.split()))  # fmt: skip
    assert found is not None
    total, drawn = map(int, found.groups())
    assert total > 10 and drawn == 8 * (lines[-1]["step"] + 1)
    assert lines[-1]["substituted_samples"] <= 10
    assert "data.max_bad_samples=0.001 allows 10" in message and message.count("warning: ") == 10
    assert not (tmp_path / "run" / "summary.json").exists()
    assert pretrain([*words, "data.max_bad_samples=0.2"]) == 0
    assert _summary(tmp_path / "run")["substituted_samples"] == 28
    none = [*words[:-1], "data.max_bad_samples=0", f"output.dir={tmp_path / 'none'}"]
    capsys.readouterr()
    assert pretrain(none) == 2
    assert "data.max_bad_samples=0 allows 0" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_two_ranks_stop_at_the_same_update_and_one_of_them_says_why(
    tiny: list[str], shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At ZeRO stage 3, after the same losses as plain PyTorch alone."""
    bad = _with_bad_images(shards, tmp_path / "bad", num=14)
    words = [*tiny, *SUBSTITUTE, "output.log_every=1", f"data.train={bad}"]
    ranks = [*words, "engine.runtime=deepspeed", "engine.zero_stage=3", "output.dir=run"]
    ended = command([*TORCHRUN, str(ROOT / "tools" / "pretrain.py"), *ranks], cwd=tmp_path)
    assert ended.code != 0
    said = " ".join((ended.out + ended.err).split())
    assert said.count("samples drawn so far could not be decoded") == 1
    assert pretrain([*words, f"output.dir={tmp_path / 'alone'}"]) == 2
    alone = " ".join(capsys.readouterr().err.split())
    total = re.search(r"\d+ of the \d+ samples drawn", alone)
    assert total is not None and total[0] in said
    assert len(_losses(tmp_path / "run")) > 5
    _assert_close(tmp_path / "run", tmp_path / "alone", 1e-5)
