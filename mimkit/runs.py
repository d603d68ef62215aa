"""Run folders: which one a command belongs to, and what is written there at the start."""

import fcntl
import itertools
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from mimkit import __version__
from mimkit.config import differences, science_hash, science_of, to_yaml
from mimkit.errors import UserError
from mimkit.files import disk_errors, is_temporary, remove_temporary, write_text
from mimkit.train import checkpoint

LATEST = "latest"  # the link to the newest run, beside it
_PACKAGES = ("torch", "torchvision", "timm", "deepspeed", "numpy", "pillow", "simplejpeg",
             "numba", "safetensors", "webdataset", "DALL-E", "pydantic")  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """A folder that holds everything a run needs to be repeated or continued."""

    path: Path
    continues: Path | None  # the checkpoint to start from
    finished: bool
    passed_over: tuple[str, ...] = ()  # why newer checkpoints are not

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def choose_run_folder(config: Any) -> RunFolder:
    """The folder named in `output.dir`, the newest unfinished run of this science, or a new one.

    Raises:
        UserError: `output.dir` holds another run (names what differs) or is no run folder.
    """
    if config.output.dir is not None:
        path = Path(config.output.dir)
        if path.exists() and not path.is_dir():
            raise UserError(f"output.dir={path} is a file; choose a folder for the run")
        if path.exists() and not all(map(_is_of_a_start, path.iterdir())):
            _refuse_another_run(path, config)
        return _open(path)
    runs = Path(config.output.runs_dir)
    mine = [
        path for path in _numbered(runs, config.name) if science_in(path) == science_hash(config)
    ]
    if mine and not (run := _open(mine[-1])).finished:
        return run
    taken = [int(path.name.rpartition("-")[2]) for path in _numbered(runs, config.name)]
    return _open(runs / f"{config.name}-{max(taken, default=0) + 1:03d}")


def _is_of_a_start(path: Path) -> bool:
    """Whether it is all that a start which was killed leaves before there is a run.json."""
    return path.name == ".lock" or is_temporary(path)


def _numbered(runs: Path, name: str) -> list[Path]:
    found = {path: path.name.removeprefix(f"{name}-") for path in runs.glob(f"{name}-*")}
    return sorted((p for p, n in found.items() if n.isdecimal()), key=lambda p: int(found[p]))


def _open(path: Path) -> RunFolder:
    if (path / "summary.json").exists():
        return RunFolder(path, None, finished=True)
    newest = checkpoint.newest_sound(path / "checkpoints")
    return RunFolder(path, newest.path, False, newest.passed_over)


def science_in(path: Path) -> str | None:
    """The `science_hash` of the run in this folder; None where there is none."""
    try:
        return str(json.loads((path / "run.json").read_text(encoding="utf-8"))["science"])
    except (OSError, ValueError, KeyError):
        return None


def _refuse_another_run(path: Path, config: BaseModel) -> None:
    found = science_in(path)
    if found is None and (path / "run.json").exists():
        raise UserError(
            f"output.dir={path} is a run whose run.json cannot be read; expected JSON with its "
            "science. Put it back from a copy, or choose another folder"
        )
    if found is None:
        raise UserError(
            f"output.dir={path} is not empty and is no run of mimkit (it has no run.json); "
            "choose another folder"
        )
    if found != science_hash(config):
        old = _kept_settings(path)
        new = config.model_dump(mode="json")
        kept = science_of(config)
        changed = differences({k: old.get(k) for k in kept}, {k: new[k] for k in kept})
        if not old:  # it was killed in its start
            changed = ["its settings, which were not written yet"]
        raise UserError(
            f"output.dir={path} holds another run; what differs: {'; '.join(changed)}. "
            "Choose another output.dir, or give the settings of that run to continue it"
        )


def _kept_settings(run: Path) -> dict[str, Any]:
    """Of the run in this folder; empty where it was killed before they were written."""
    path = run / "config.yaml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.exists() else {}


@dataclass(frozen=True)
class Lock:
    """Holds a run folder until it is closed or the process ends, whatever becomes of the object.

    Attributes:
        made: folders that were not there before, the run's own first.
    """

    descriptor: int
    made: tuple[Path, ...]

    def close(self) -> None:
        os.close(self.descriptor)


_BUSY = (
    "another process is training in {path}; wait for it, or choose another output.dir, name or seed"
)


def lock(run: RunFolder, *, busy: str = _BUSY) -> Lock:
    """Takes the folder for this process.

    lockf, not flock: loader processes would inherit that, and hold it after this one was killed.

    Args:
        busy: what is said where another process has it; {path} is the folder.

    Raises:
        UserError: another process has it.
    """
    folders = (run.path, *run.path.parents)
    made = tuple(itertools.takewhile(lambda folder: not folder.exists(), folders))
    with disk_errors(run.path):
        run.path.mkdir(parents=True, exist_ok=True)
        held = Lock(os.open(run.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), made)
    try:
        fcntl.lockf(held.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held.close()
        raise UserError(busy.format(path=run.path)) from error
    return held


def remove_if_empty(run: RunFolder, held: Lock) -> None:
    """What a start that was refused has made: a folder with nothing but the lock in it."""
    if [file.name for file in run.path.iterdir()] == [".lock"]:
        (run.path / ".lock").unlink()
        for folder in (run.path, *held.made[1:]):
            folder.rmdir()


def changed_settings(run: RunFolder, config: BaseModel) -> list[str]:
    """`output.log_every: 10 -> 2`: where the run's own configuration differs, which changes no
    number of it."""
    return differences(_kept_settings(run.path), config.model_dump(mode="json"))


def write_start(run: RunFolder, config: BaseModel, *, facts: dict[str, Any]) -> list[str]:
    """Writes run.json and config.yaml of a new run; for an old one says which versions changed.

    run.json comes first: a folder with other files and without it is not ours. What a start that
    was killed did not come to is done by the next one.

    Args:
        facts: what decides the numbers and is not in the configuration: digests of data and of
            a user's own code, precision.

    Returns:
        What differs in versions since the run began: `torch: 2.13 -> 2.14`.

    Raises:
        UserError: a fact differs, so the run could not be continued as it was.
    """
    remove_temporary(run.path)
    changed = _write_or_compare(run, config, facts=facts)
    if not (run.path / "config.yaml").exists():
        _point_latest(run.path)
        write_text(run.path / "config.yaml", to_yaml(config))
    return changed


def _write_or_compare(run: RunFolder, config: BaseModel, *, facts: dict[str, Any]) -> list[str]:
    """run.json; see `write_start`."""
    if (run.path / "run.json").exists():
        before = json.loads((run.path / "run.json").read_text(encoding="utf-8"))
        _refuse_other_facts(run, before["facts"], facts)
        return differences(before["versions"], versions())
    start = {"mimkit": __version__, "science": science_hash(config), "command": sys.argv,
             "git": _git_state(), "python": platform.python_version(),
             "machine": platform.platform(), "versions": versions(), "facts": facts}  # fmt: skip
    write_text(run.path / "run.json", json.dumps(start, indent=2))
    return []


def check_facts(run: RunFolder, facts: dict[str, Any]) -> None:
    """Of a run that is there, also a finished one: facts that are known before anything is built.

    Raises:
        UserError: one is on record and differs.
    """
    if (run.path / "run.json").exists():
        before = json.loads((run.path / "run.json").read_text(encoding="utf-8"))["facts"]
        known = {key: before[key] for key in facts if key in before}
        _refuse_other_facts(run, known, {key: facts[key] for key in known})


def _refuse_other_facts(run: RunFolder, before: dict[str, Any], now: dict[str, Any]) -> None:
    if changed := differences(before, now):
        raise UserError(
            f"{run.path} was begun with something else: {'; '.join(changed)}. Restore it, or "
            "start another run with another output.dir, name or seed"
        )


def _point_latest(path: Path) -> None:
    """`runs/latest` -> the newest run, replaced in one step."""
    link, temporary = path.parent / LATEST, path.parent / f".{LATEST}.tmp"
    if link.exists() and not link.is_symlink():
        return
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)
    temporary.replace(link)


def versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _git_state() -> dict[str, Any] | None:
    """Commit of the checkout mimkit runs from, and whether it was changed; None in a wheel."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
        return run.stdout.strip()

    return {
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
    }
