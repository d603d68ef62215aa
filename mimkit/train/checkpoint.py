"""Checkpoints of whole tensors: safetensors that fit every ZeRO stage and number of ranks.

A checkpoint is a folder `step-00000500` that is renamed into place when it is complete:
`model.safetensors` (fp32 weights and buffers), `optimizer.safetensors` (AdamW's moments) and
`state.json` (updates, data position, count of bad samples, sizes and hashes of the other two).
Nothing in it is pickled.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from mimkit.errors import UserError
from mimkit.files import atomic_folder, remove_temporary, sha256

FORMAT = 1
_FILES = ("model.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped."""

    updates: int  # optimizer steps done
    position: int  # samples consumed: the only state of the data
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    bad_samples: int = 0  # that others stood in for, over all ranks


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes the checkpoint beside the others and removes all but the newest `keep`.

    What a process that was killed in writing left is removed too: a run has one writer.

    Raises:
        UserError: the disk is full; the others are as they were.
    """
    path = folder / f"step-{checkpoint.updates:08d}"
    if path.exists():  # left by a run that was stopped right after saving: it is the same
        return path
    remove_temporary(folder)
    with atomic_folder(path) as temporary:
        for name, tensors in zip(_FILES, (checkpoint.weights, checkpoint.moments), strict=True):
            whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(whole, temporary / name, {"format": "pt"})
            (temporary / name).chmod(0o644)  # safetensors makes it readable for its owner only
        files = {name: _describe(temporary / name) for name in _FILES}
        state = {"format": FORMAT, "updates": checkpoint.updates, "position": checkpoint.position,
                 "bad_samples": checkpoint.bad_samples, "files": files}  # fmt: skip
        (temporary / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    for old in _folders(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, if there is one."""
    found = _folders(folder)
    return found[-1] if found else None


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint after checking its hashes.

    Raises:
        UserError: a file is missing or damaged, or a newer mimkit wrote it.
    """
    state = read_state(path)
    for name, expected in state["files"].items():
        if not (path / name).exists() or _describe(path / name) != expected:
            raise UserError(
                f"the checkpoint file {path / name} is missing or damaged; expected "
                f"{expected['bytes']} bytes, sha256 {expected['sha256'][:12]}. Remove the folder "
                f"{path} to continue from the checkpoint before it"
            )
    return Checkpoint(
        updates=state["updates"],
        position=state["position"],
        weights=load_file(path / _FILES[0]),
        moments=load_file(path / _FILES[1]),
        bad_samples=state.get("bad_samples", 0),
    )


def read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no checkpoint: cannot read its state.json ({error})") from error
    if state.get("format") != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {state.get('format')}, this mimkit reads {FORMAT}; "
            "use the version of mimkit that wrote it"
        )
    return state


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").exists())


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
