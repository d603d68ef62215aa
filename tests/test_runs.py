"""What is in a run's folder before there is anything to go on with."""

import json
from pathlib import Path

import pytest
from commands import ROOT

from mimkit.config import Config, load_config
from mimkit.errors import UserError
from mimkit.runs import RunFolder, choose_run_folder, lock, write_start


def _config(folder: Path, *words: str) -> Config:
    return load_config(ROOT / "configs" / "default.yaml", [f"output.dir={folder}", *words])


def _begin(folder: Path) -> list[str]:
    held = lock(RunFolder(folder, None, False))
    changed = write_start(RunFolder(folder, None, False), _config(folder), facts={"a": 1})
    held.close()
    return changed


@pytest.mark.parametrize(
    "left", [[".lock"], [".lock", ".run.json.9180.tmp"], ["run.json"], ["run.json", ".x.9.tmp"]]
)
def test_a_start_that_was_killed_is_begun_again(left: list[str], tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    _begin(whole)
    folder.mkdir()
    for name in left:
        text = (whole / name).read_bytes() if name == "run.json" else b"{"
        (folder / name).write_bytes(text)
    assert choose_run_folder(_config(folder)) == RunFolder(folder, None, False)
    (tmp_path / "latest").unlink()
    assert _begin(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "config.yaml", "run.json"]
    assert (tmp_path / "latest").resolve() == folder
    ours, theirs = (json.loads((f / "run.json").read_text()) for f in (folder, whole))
    assert ours["science"] == theirs["science"]


def test_a_damaged_run_json_is_called_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert _begin(folder) == []
    (folder / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json cannot be read; expected JSON"):
        choose_run_folder(_config(folder))


def test_files_of_others_and_another_run_are_left_alone(tmp_path: Path) -> None:
    for name in ("config.yaml", "notes.txt"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(UserError, match="is no run of mimkit"):
            choose_run_folder(_config(folder))
        assert (folder / name).read_text() == "mine"
    _begin(tmp_path / "run")
    with pytest.raises(UserError, match=r"holds another run; what differs: seed: 0 -> 1"):
        choose_run_folder(_config(tmp_path / "run", "seed=1"))
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(UserError, match="its settings, which were not written yet"):
        choose_run_folder(_config(tmp_path / "run", "seed=1"))
