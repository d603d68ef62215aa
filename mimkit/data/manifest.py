"""manifest.json: what a folder of shards holds, with a checksum for each; written last."""

import json
from pathlib import Path
from typing import Any

from mimkit.class_names import EXPECTED, class_names
from mimkit.errors import UserError
from mimkit.files import sha256

MANIFEST = "manifest.json"
CLASSES = "classes.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`; empty where there is none, or one of another kind.

    Raises:
        UserError: it is there, and cannot be read as JSON.
    """
    return parse_manifest(_content(folder / MANIFEST), where=str(folder / MANIFEST))


def parse_manifest(content: bytes | None, *, where: str) -> dict[str, Any]:
    """The same of what a file held; None where there was none. Raises UserError."""
    try:
        manifest = {} if content is None else _parsed(content)
    except ValueError as error:
        raise UserError(
            f"{where} is no JSON ({error}), so nothing beside it can be checked: write it again, "
            "or remove it to do without checksums"
        ) from error
    return manifest if isinstance(manifest, dict) else {}


def read_classes(folder: Path) -> list[str]:
    """Names of the labels by number; empty where there is no classes.json.

    Raises:
        UserError: it is there, and names no classes.
    """
    return parse_classes(_content(folder / CLASSES), where=str(folder / CLASSES))


def parse_classes(content: bytes | None, *, where: str) -> list[str]:
    """The same of what a file held; None where there was none. Raises UserError."""
    try:
        return [] if content is None else class_names(_parsed(content))
    except ValueError as error:
        raise UserError(
            f"{where} does not name the classes ({error}); expected: {EXPECTED}. Write it again, "
            "or remove it to go by the labels' numbers alone"
        ) from error


def _content(path: Path) -> bytes | None:
    """None where there is no such file. Raises UserError where it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}); mend that, or remove it"
        ) from error


def _parsed(content: bytes) -> Any:
    """ValueError for what is no JSON, in few words."""
    try:
        return json.loads(content.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


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
