"""A checkpoint is there whole or not at all, and comes back bit for bit."""

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mimkit.errors import UserError
from mimkit.files import atomic_folder
from mimkit.train import checkpoint
from mimkit.train.checkpoint import Checkpoint
from mimkit.train.saving import BackgroundSaver


def _make(updates: int) -> Checkpoint:
    draw = torch.Generator().manual_seed(updates)
    weights = {
        "stem.weight": torch.randn(64, 32, generator=draw),
        "stem.num_batches_tracked": torch.tensor(updates),
        "not.contiguous": torch.randn(5, 7, generator=draw).t(),
        "odd": torch.tensor([float("inf"), -0.0, 1e-45]),
    }
    moments = {"stem.weight/exp_avg": torch.randn(64, 32, generator=draw)}
    return Checkpoint(updates, updates * 8, weights, moments)


def _is_equal(one: Checkpoint, other: Checkpoint) -> bool:
    return (one.updates, one.position) == (other.updates, other.position) and all(
        a.keys() == b.keys()
        and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
        for a, b in ((one.weights, other.weights), (one.moments, other.moments))
    )


def test_it_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _make(500), keep=2).path
    assert path == tmp_path / "step-00000500"
    assert sorted(file.name for file in path.iterdir()) == [
        "model.safetensors", "optimizer.safetensors", "state.json",
    ]  # fmt: skip
    assert _is_equal(checkpoint.load(path), _make(500))
    assert not _is_equal(checkpoint.load(path), _make(501))


def test_the_newest_few_are_kept_in_numerical_order(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for updates in (9, 10, 99_999_998, 99_999_999):
        checkpoint.save(tmp_path, _make(updates), keep=2)
        assert checkpoint.latest(tmp_path) == tmp_path / f"step-{updates:08d}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-99999998", "step-99999999"]


def test_saving_what_is_there_already_changes_nothing(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _make(5), keep=1).path
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert checkpoint.save(tmp_path, _make(5), keep=1).path == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named(name: str, damage: str, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _make(3), keep=1).path
    data = bytearray((path / name).read_bytes())
    if damage == "remove":
        (path / name).unlink()
    else:
        data[-1] ^= 1
        (path / name).write_bytes(data if damage == "flip" else data[:-10])
    what = "is missing" if damage == "remove" else r"is damaged: \d+ bytes, sha256 \w+, expected"
    with pytest.raises(UserError, match=f"{path / name} {what}.*There is none before it: put a"):
        checkpoint.load(path)
    checkpoint.save(tmp_path, _make(2), keep=2)
    with pytest.raises(UserError, match=f"Remove the folder {path} to use step-00000002 before it"):
        checkpoint.load(path)
    assert str(path / name) in str(checkpoint.problem(path))


def test_everything_that_a_run_counts_comes_back(tmp_path: Path) -> None:
    made = replace(_make(7), bad_samples=3, nonfinite=2, applied=5, position=80,
                   pending=[{"sums": {"loss": [0.1 + 0.2, 8]}, "bad": 1}],
                   average={"stem.weight": torch.ones(2)})  # fmt: skip
    read = checkpoint.load(checkpoint.save(tmp_path, made, keep=1).path)
    assert _is_equal(read, made)
    for name in ("bad_samples", "nonfinite", "applied", "pending"):
        assert getattr(read, name) == getattr(made, name)
    assert read.average is not None and torch.equal(read.average["stem.weight"], torch.ones(2))
    assert read.chosen("best") is read.average and read.chosen("trained") is read.weights
    with pytest.raises(UserError, match=r"keeps no average.*train\.ema is null"):
        _make(7).chosen("average")


def test_a_changed_number_in_the_state_is_found(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _make(3), keep=1).path
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"position": 24', '"position": 34'))
    with pytest.raises(UserError, match=r"state\.json is damaged: its digest does not fit"):
        checkpoint.load(path)


def test_the_newest_sound_one_is_taken_and_what_is_wrong_with_newer_ones_is_said(
    tmp_path: Path,
) -> None:
    paths = [checkpoint.save(tmp_path, _make(updates), keep=9).path for updates in (1, 2, 3)]
    assert checkpoint.newest_sound(tmp_path) == checkpoint.Newest(paths[2])
    (paths[2] / "optimizer.safetensors").unlink()
    (paths[1] / "state.json").write_text("{")
    found = checkpoint.newest_sound(tmp_path)
    assert found.path == paths[0]
    assert found.passed_over[0] == f"{paths[2] / 'optimizer.safetensors'} is missing"
    assert found.passed_over[1].startswith(f"{paths[1]} is no checkpoint")
    again = checkpoint.save(tmp_path, _make(3), keep=9).path
    assert _is_equal(checkpoint.load(again), _make(3))
    assert checkpoint.newest_sound(tmp_path).path == paths[2]  # written again where it was damaged
    for path in paths:
        (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        UserError, match=f"every checkpoint in {tmp_path} is damaged.*step-00000002"
    ):
        checkpoint.newest_sound(tmp_path)
    assert checkpoint.newest_sound(tmp_path / "none") == checkpoint.Newest(None)


def test_a_newer_format_is_not_passed_over(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, _make(1), keep=9)
    path = checkpoint.save(tmp_path, _make(2), keep=9).path
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": checkpoint.FORMAT + 1}))
    with pytest.raises(UserError, match=f"format {checkpoint.FORMAT + 1}, this mimkit reads"):
        checkpoint.newest_sound(tmp_path)


def test_the_time_of_files_and_clocks_means_nothing(tmp_path: Path) -> None:
    for updates, when in ((1, 2_000_000_000), (2, 1_000)):
        path = checkpoint.save(tmp_path, _make(updates), keep=9).path
        for file in (path, *path.iterdir()):
            os.utime(file, (when, when))
    assert checkpoint.newest_sound(tmp_path).path == path


def test_some_are_kept_for_good(tmp_path: Path) -> None:
    for updates in range(1, 10):
        checkpoint.save(tmp_path, _make(updates), keep=2, keep_every=3)
    assert _names(tmp_path) == [f"step-{updates:08d}" for updates in (3, 6, 8, 9)]


def test_a_disk_that_is_too_small_is_found_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, _make(1), keep=1)
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(
        UserError, match=r"needs 0 MiB, but only 0 MiB are free in .*keep_checkpoin"
    ):
        checkpoint.save(tmp_path, _make(2), keep=1)
    assert _names(tmp_path) == ["step-00000001"]


def test_the_expected_size_is_that_of_the_files(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32))
    model[0].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    moments = {f"{i}/{key}": p.detach().clone() for i, p in enumerate(trained) for key in "ab"}
    for average in (None, model.state_dict()):
        made = Checkpoint(1, 8, model.state_dict(), moments, average=average)
        saved = checkpoint.save(tmp_path / str(average is None), made, keep=1)
        expected = checkpoint.expected_bytes(model, average=average is not None)
        assert 0 < saved.bytes - expected < 5000  # headers and state.json


@pytest.mark.parametrize("text", ["", "{", '{"format": 2, "updates": 1}', '{"updates": 1}'])
def test_another_format_is_refused(text: str, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _make(3), keep=1).path
    (path / "state.json").write_text(text)
    with pytest.raises(UserError, match=str(path)):
        checkpoint.load(path)


def test_a_newer_format_names_both_versions(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _make(3), keep=1).path
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": checkpoint.FORMAT + 1}))
    with pytest.raises(UserError, match=f"format {checkpoint.FORMAT + 1}, this mimkit reads"):
        checkpoint.load(path)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupted_write_leaves_the_one_before(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the first and in the second file; nothing temporary stays."""
    checkpoint.save(tmp_path, _make(1), keep=1)
    calls = []

    def save_file(tensors, path, metadata) -> None:
        calls.append(path)
        path.write_bytes(b"half")
        if len(calls) == call:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "save_file", save_file)
        checkpoint.save(tmp_path, _make(2), keep=1)
    assert len(calls) == call
    assert _names(tmp_path) == ["step-00000001"]
    assert _is_equal(checkpoint.load(tmp_path / "step-00000001"), _make(1))


def test_what_a_killed_process_left_is_no_checkpoint_and_is_cleared(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, _make(1), keep=2)
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "step-00000002") as temporary:
        (temporary / "state.json").write_text("{}")
        left = tmp_path / temporary.name.replace(".tmp", "9.tmp")
        left.mkdir()  # as kill -9 leaves it, of a process with another number
        (left / "state.json").write_text("{}")
        raise ZeroDivisionError
    assert _names(tmp_path) == [left.name, "step-00000001"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    checkpoint.save(tmp_path, _make(2), keep=2)
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]


FULL = """
import resource, sys
from pathlib import Path
import torch
from mimkit.errors import UserError
from mimkit.train import checkpoint
weights = {"a": torch.zeros(4000)}
for limit in (0, 8000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        checkpoint.save(Path(sys.argv[1]), checkpoint.Checkpoint(2, 16, weights, weights), keep=1)
    except UserError as error:
        print(error)
"""


def test_a_full_disk_is_a_users_error_and_the_one_before_stays(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: every write beyond it fails."""
    checkpoint.save(tmp_path, _make(1), keep=1)
    words = [sys.executable, "-c", FULL, str(tmp_path)]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first == second
    assert first.startswith(f"cannot write {tmp_path / 'step-00000002'}: File too large")
    assert "Free some space" in first
    assert _names(tmp_path) == ["step-00000001"]
    assert _is_equal(checkpoint.load(tmp_path / "step-00000001"), _make(1))


def test_a_checkpoint_is_written_in_the_background_and_told_when_it_is(tmp_path: Path) -> None:
    begun, go_on, told = threading.Event(), threading.Event(), []

    def save(made: Checkpoint) -> checkpoint.Saved:
        begun.set()
        go_on.wait(10)
        return checkpoint.save(tmp_path, made, keep=5)

    with BackgroundSaver(
        save, told=lambda made, saved: told.append((made.updates, saved))
    ) as saver:
        saver.start(_make(1))
        assert begun.wait(10)
        saver.look()
        assert told == [] and _names(tmp_path) == []  # nobody waits for it
        go_on.set()
        saver.start(_make(2))  # but the next one does
        assert [updates for updates, _ in told] == [1]
    assert [updates for updates, _ in told] == [1, 2]
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]


def test_what_could_not_be_written_in_the_background_is_an_error_in_front(tmp_path: Path) -> None:
    def full(_: Checkpoint) -> checkpoint.Saved:
        raise UserError("the disk is full")

    saver = BackgroundSaver(full, told=lambda *_: None)
    for ask in (saver.wait, saver.look, lambda: saver.start(_make(2))):
        saver.start(_make(1))
        with pytest.raises(UserError, match="the disk is full"):
            while True:
                ask()
    with pytest.raises(ZeroDivisionError), saver:  # what ended the training is what is told
        saver.start(_make(3))
        raise ZeroDivisionError
