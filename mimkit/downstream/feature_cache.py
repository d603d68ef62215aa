"""Features on disk, so that a second look at an encoder costs nothing.

A folder for each (encoder, images, view): its name is a hash of all that its numbers depend on, so
features of something else are never found. Arrays are plain `.npy` files, read as memory maps;
`facts.json` has their SHA-256, which is verified at every opening.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mimkit.downstream.features import Allocate, Extracted
from mimkit.errors import UserError
from mimkit.files import atomic_folder, sha256

_FORMAT = "mimkit.features.1"
_FACTS = "facts.json"
_ROWS = ("label_B", "index_B")


def cached(
    folder: Path,
    facts: Mapping[str, Any],
    make: Callable[[Allocate], Extracted],
    *,
    say: Callable[[str], object],
) -> Extracted:
    """The features that `facts` stand for: out of `folder`, or made and put there.

    Args:
        facts: all that they depend on, as JSON: the encoder's hash, the source's digest, the view.
        make: extracts them into arrays of the allocator it is given.
        say: told what was found, made, or wrong.

    Raises:
        UserError: the disk is full or forbidden; `make`'s own.
    """
    facts = {"format": _FORMAT, **facts}
    text = json.dumps(facts, sort_keys=True)
    path = folder / hashlib.sha256(text.encode()).hexdigest()[:24]
    if path.exists():
        if (damage := _damage(path, facts)) is None:
            say(f"features: found in {path}")
            return _open(path)
        say(f"features: those in {path} are damaged ({damage}); made again")
        shutil.rmtree(path)
    with atomic_folder(path) as temporary:
        _make(temporary, facts, make)
    say(f"features: kept in {path} ({_size(path) / 2**20:.0f} MiB)")
    return _open(path)


def _make(temporary: Path, facts: Mapping[str, Any], make: Callable[[Allocate], Extracted]) -> None:
    promised = 0  # memory maps take their room when they are written to

    def allocate(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        nonlocal promised
        promised += int(np.prod(shape)) * np.dtype(dtype).itemsize
        _check_room(temporary, promised)
        file = temporary / f"{name}.npy"
        return np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)

    made = make(allocate)
    for array in made.arrays.values():
        array.flush()  # type: ignore[attr-defined]  # they are memory maps
    for name in _ROWS:
        np.save(temporary / f"{name}.npy", getattr(made, name).numpy())
    files = {file.name: sha256(file) for file in sorted(temporary.glob("*.npy"))}
    (temporary / _FACTS).write_text(json.dumps({"facts": facts, "files": files}, indent=1))


def _check_room(folder: Path, needed: int) -> None:
    """A memory map of a full disk ends the process by a signal, so it is looked at before."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"features need {needed / 2**30:.1f} GiB in {folder.parent}, which has "
            f"{free / 2**30:.1f} GiB left; give fewer --layers, a --limit, another --cache-dir, or "
            "--cache-dir none for memory"
        )


def _damage(path: Path, facts: Mapping[str, Any]) -> str | None:
    """What is wrong with a folder of the cache."""
    try:
        found = json.loads((path / _FACTS).read_text())
        if found["facts"] != facts:
            return "they are of something else"
        for name, expected in found["files"].items():
            if sha256(path / name) != expected:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _open(path: Path) -> Extracted:
    arrays = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False)
              for file in sorted(path.glob("*.npy"))}  # fmt: skip
    label_B, index_B = (torch.from_numpy(np.array(arrays.pop(name))) for name in _ROWS)
    return Extracted(arrays, label_B, index_B)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())
