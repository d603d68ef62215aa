"""A checkpoint is there whole or not at all, and comes back bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mimkit.errors import UserError
from mimkit.files import atomic_folder
from mimkit.train import checkpoint
from mimkit.train.checkpoint import Checkpoint


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
    path = checkpoint.save(tmp_path, _make(500), keep=2)
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
    path = checkpoint.save(tmp_path, _make(5), keep=1)
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert checkpoint.save(tmp_path, _make(5), keep=1) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named(name: str, damage: str, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _make(3), keep=1)
    data = bytearray((path / name).read_bytes())
    if damage == "remove":
        (path / name).unlink()
    else:
        data[-1] ^= 1
        (path / name).write_bytes(data if damage == "flip" else data[:-10])
    with pytest.raises(UserError, match=f"{path / name} is missing or damaged.*Remove the folder"):
        checkpoint.load(path)


@pytest.mark.parametrize("text", ["", "{", '{"format": 2, "updates": 1}', '{"updates": 1}'])
def test_another_format_is_refused(text: str, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _make(3), keep=1)
    (path / "state.json").write_text(text)
    with pytest.raises(UserError, match=str(path)):
        checkpoint.load(path)


def test_a_newer_format_names_both_versions(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _make(3), keep=1)
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
