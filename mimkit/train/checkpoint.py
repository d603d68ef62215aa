"""Checkpoints of whole tensors: safetensors that fit every ZeRO stage and number of ranks.

A checkpoint is a folder `step-00000500` that is renamed into place when it is complete:
`model.safetensors` (fp32 weights and buffers), `optimizer.safetensors` (the moments), where an
average of the weights is kept `ema.safetensors` (named as model.safetensors is), and `state.json`
(updates, data position, counts, sizes and hashes of the others), which is written last. Nothing in
it is pickled.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.files import atomic_folder, free_space, remove_temporary, sha256

FORMAT = 1
Which = Literal["best", "trained", "average"]  # best: the average where there is one
_MODEL, _OPTIMIZER, _EMA = "model.safetensors", "optimizer.safetensors", "ema.safetensors"


class UnreadableError(UserError):
    """A state.json that is missing or damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped."""

    updates: int  # optimizer steps done
    position: int  # samples consumed: the only state of the data
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    bad_samples: int = 0  # that others stood in for, over all ranks
    nonfinite: int = 0  # updates that were not made
    applied: int | None = None  # updates that the optimizer counted; None: all
    pending: Sequence[Mapping[str, Any]] = ()  # a rank each: of a line of metrics not yet written
    average: Mapping[str, Tensor] | None = None  # of the weights, where one is kept

    def chosen(self, which: Which) -> Mapping[str, Tensor]:
        """The weights to judge and to export.

        Raises:
            UserError: the average is asked for, and there is none.
        """
        if which == "average" and self.average is None:
            raise UserError("the run keeps no average of its weights (train.ema is null); leave "
                            "--weights out, or give trained")  # fmt: skip
        return self.weights if which == "trained" or self.average is None else self.average

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """What is in which file."""
        average = {} if self.average is None else {_EMA: self.average}
        return {_MODEL: self.weights, _OPTIMIZER: self.moments, **average}


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, and what it cost."""

    path: Path
    bytes: int
    seconds: float


def save(folder: Path, checkpoint: Checkpoint, *, keep: int, keep_every: int | None = None
         ) -> Saved:  # fmt: skip
    """Writes the checkpoint beside the others; removes all but the newest `keep`, and those whose
    updates are a multiple of `keep_every`.

    What a process that was killed in writing left is removed too: a run has one writer.

    Raises:
        UserError: the disk is full; the others are as they were.
    """
    started = time.perf_counter()
    path = folder / f"step-{checkpoint.updates:08d}"
    if path.exists():  # left by a run that was stopped right after saving, or damaged since
        if problem(path) is None:
            return Saved(path, _size(path), time.perf_counter() - started)
        shutil.rmtree(path)
    remove_temporary(folder)
    check_space(folder, sum(_bytes(tensors) for tensors in checkpoint.tensors().values()))
    with atomic_folder(path) as temporary:
        _write(temporary, checkpoint)
    for old in _folders(folder)[:-keep]:
        if not keep_every or updates_of(old) % keep_every:
            _remove(old)
    return Saved(path, _size(path), time.perf_counter() - started)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    for name, tensors in checkpoint.tensors().items():
        whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(whole, folder / name, {"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors makes it readable for its owner only
    files = {name: _describe(folder / name) for name in checkpoint.tensors()}
    state: dict[str, Any] = {
        "format": FORMAT, "updates": checkpoint.updates, "position": checkpoint.position,
        "bad_samples": checkpoint.bad_samples, "nonfinite": checkpoint.nonfinite,
        "applied": checkpoint.applied, "pending": list(checkpoint.pending), "files": files,
    }  # fmt: skip
    state["digest"] = _digest(state)
    (folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")


def _digest(state: Mapping[str, Any]) -> str:
    """Of everything else in state.json."""
    rest = {key: value for key, value in state.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _remove(path: Path) -> None:
    """state.json first: what is left when it is interrupted is no checkpoint."""
    (path / "state.json").unlink(missing_ok=True)
    shutil.rmtree(path)


def check_space(folder: Path, needed: int, *, why: str = "the next checkpoint") -> None:
    """UserError where the disk of `folder` has less than `needed` bytes free."""
    free, there = free_space(folder)
    if free < needed:
        raise UserError(
            f"{why} needs {needed / 2**20:.0f} MiB, but only {free / 2**20:.0f} MiB are free in "
            f"{there}. Free some space, set output.keep_checkpoints lower, or choose another folder"
        )


def expected_bytes(model: nn.Module, *, average: bool) -> int:
    """Of a checkpoint of a model that is whole, in fp32."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole: int = sum(tensor.numel() for tensor in model.state_dict().values())
    return 4 * (whole * (1 + average) + 2 * trained)


def most_at_once(updates: Iterable[int], *, keep: int, keep_every: int | None) -> int:
    """How many checkpoints there are at most, that which is being written too, where `save` is
    called after these updates."""
    newest, for_good, most = list[int](), 0, 0
    for saved in updates:
        newest.append(saved)
        most = max(most, len(newest) + for_good)
        if len(newest) > keep:
            old = newest.pop(0)
            for_good += bool(keep_every) and old % (keep_every or 1) == 0
    return most


def left_over(updates: Sequence[int], *, keep: int, keep_every: int | None) -> int:
    """How many of them there are in the end."""
    old = updates[: max(0, len(updates) - keep)]
    for_good = sum(saved % keep_every == 0 for saved in old) if keep_every else 0
    return len(updates) - len(old) + for_good


def count(folder: Path) -> int:
    """How many checkpoints there are."""
    return len(_folders(folder))


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def updates_of(path: Path) -> int:
    """By the name of the folder."""
    return int(path.name.removeprefix("step-"))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, if there is one."""
    found = _folders(folder)
    return found[-1] if found else None


@dataclass(frozen=True)
class Newest:
    """The newest sound checkpoint, and why newer ones are passed over."""

    path: Path | None
    passed_over: tuple[str, ...] = ()


def newest_sound(folder: Path) -> Newest:
    """Reads and hashes the newest, and those before it as long as they are damaged.

    Raises:
        UserError: there are some, and all are damaged.
    """
    passed_over = list[str]()
    for path in reversed(_folders(folder)):
        if (damage := problem(path)) is None:
            return Newest(path, tuple(passed_over))
        passed_over.append(damage)
    if passed_over:
        raise UserError(
            f"every checkpoint in {folder} is damaged: {'; '.join(passed_over)}. Put a sound copy "
            f"back, or remove the folder {folder} to train from the beginning"
        )
    return Newest(None)


def problem(path: Path) -> str | None:
    """What is wrong with a checkpoint, if something is.

    Raises:
        UserError: a newer mimkit wrote it.
    """
    try:
        state = read_state(path)
    except UnreadableError as error:
        return str(error)
    for name, expected in state["files"].items():
        try:
            found = _describe(path / name)
        except FileNotFoundError:
            return f"{path / name} is missing"
        if found != expected:
            return (
                f"{path / name} is damaged: {found['bytes']} bytes, sha256 {found['sha256'][:12]}, "
                f"expected {expected['bytes']} bytes, {expected['sha256'][:12]}"
            )
    return None


def load(path: Path, *, check: bool = True) -> Checkpoint:
    """Reads a checkpoint after checking its hashes.

    Args:
        check: False where `newest_sound` has just done it.

    Raises:
        UserError: a file is missing or damaged, or a newer mimkit wrote it.
    """
    state = read_state(path)
    if check and (damage := problem(path)) is not None:
        before = [other for other in _folders(path.parent) if other.name < path.name]
        raise UserError(
            f"{damage}. "
            + (f"Remove the folder {path} to use {before[-1].name} before it" if before else
               f"There is none before it: put a sound copy back, or remove the folder {path} to "
               "train from the beginning")
        )  # fmt: skip
    return Checkpoint(
        updates=state["updates"],
        position=state["position"],
        weights=load_file(path / _MODEL),
        moments=load_file(path / _OPTIMIZER),
        bad_samples=state.get("bad_samples", 0),
        nonfinite=state.get("nonfinite", 0),
        applied=state.get("applied"),
        pending=state.get("pending", ()),
        average=load_file(path / _EMA) if _EMA in state["files"] else None,
    )


def read_state(path: Path) -> dict[str, Any]:
    """state.json; UserError where it cannot be read, or a newer mimkit wrote it."""
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnreadableError(
            f"{path} is no checkpoint: cannot read its state.json ({error})"
        ) from error
    if state.get("format") != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {state.get('format')}, this mimkit reads {FORMAT}; "
            "use the version of mimkit that wrote it"
        )
    if state.get("digest", _digest(state)) != _digest(state):
        raise UnreadableError(f"{path / 'state.json'} is damaged: its digest does not fit")
    return state


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").exists())


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
