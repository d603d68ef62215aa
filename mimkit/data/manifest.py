"""manifest.json: what a folder of shards holds, with a checksum for each; written last."""

import json
from pathlib import Path
from typing import Any

from mimkit.errors import UserError
from mimkit.files import sha256

MANIFEST = "manifest.json"
CLASSES = "classes.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`; empty where there is none, or another kind of file."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def read_classes(folder: Path) -> list[str]:
    """Names of the labels by number; empty where there is no classes.json that lists them."""
    try:
        classes = json.loads((folder / CLASSES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [str(name) for name in classes] if isinstance(classes, list) else []


def check_shard(shard: Path, *, num_samples: int) -> None:
    """Compares a shard with what manifest.json beside it says, if that names it.

    Raises:
        UserError: the SHA-256 or the number of samples differs.
    """
    check_bytes(shard)
    check_count(shard, num_samples=num_samples)


def check_bytes(shard: Path) -> None:
    """Raises UserError where the SHA-256 of `shard` is another than in manifest.json beside it."""
    expected = shard_entry(shard).get("sha256")
    if isinstance(expected, str) and (found := sha256(shard)) != expected.lower():
        raise UserError(
            f"bad checksum: {shard} has SHA-256 {found}, but {MANIFEST} beside it says {expected}. "
            "The file is damaged or was replaced: fetch it again, or correct the manifest."
        )


def check_count(shard: Path, *, num_samples: int) -> None:
    """Raises UserError where manifest.json beside `shard` says another number of samples."""
    samples = shard_entry(shard).get("samples")
    if isinstance(samples, int) and samples != num_samples:
        raise UserError(
            f"{shard} holds {num_samples} images, but {MANIFEST} beside it says {samples} samples. "
            "Fetch the shard again, or correct the manifest."
        )


def shard_entry(shard: Path) -> dict[str, Any]:
    """What manifest.json beside `shard` says of it; empty where it does not name it."""
    entries = read_manifest(shard.parent).get("shards")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("shard") == shard.name:
            return entry
    return {}
