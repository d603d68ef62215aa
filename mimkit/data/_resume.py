"""How far a `make_shards` got: what lies in its two folders, and whether it may go on there."""

import csv
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mimkit.data.manifest import read_manifest
from mimkit.data.patterns import UNFINISHED
from mimkit.data.writer import FAILURES, Failure, ShardRecord, write_json
from mimkit.errors import UserError

Settings = dict[str, str | int]


@dataclass
class State:
    """One record for each planned shard that is done; None where all its images were bad."""

    settings: Settings
    records: list[ShardRecord | None] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def shards(self) -> list[ShardRecord]:
        return [record for record in self.records if record is not None]

    def save(self, folder: Path) -> None:
        write_json(folder / UNFINISHED, asdict(self))


def load_state(folder: Path, settings: Settings) -> State:
    """The state in `folder`, or an empty one. Raises UserError if it was made with other settings.

    A shard that is no longer as it was written ends what is taken over.
    """
    try:
        saved = json.loads((folder / UNFINISHED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return State(settings)
    _check_same(saved["settings"], settings, folder)
    records = [ShardRecord(**record) if record else None for record in saved["records"]]
    for record in records:
        shard = folder / (record.shard if record else "")
        if record and (not shard.exists() or shard.stat().st_size != record.bytes):
            raise UserError(
                f"{shard} is not as make_shards left it; remove {folder} and start again."
            )
    return State(settings, records, [Failure(*failure) for failure in saved["failures"]])


def find_complete(out: Path, settings: Settings) -> State | None:
    """What a complete `out` holds, made with the same settings; None if `out` is free.

    Raises:
        UserError: `out` holds something else.
    """
    if not out.exists():
        return None
    names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else [out.name]
    if not names:
        return None
    manifest = read_manifest(out) if out.is_dir() else {}
    if not isinstance(manifest.get("settings"), dict):
        raise UserError(
            f"{out} was not written by make_shards (found: {', '.join(names[:3])}). Choose "
            "another OUT, or remove it."
        )
    _check_same(manifest["settings"], settings, out)
    (out / UNFINISHED).unlink(missing_ok=True)  # a run was killed right after its last step
    records = [ShardRecord(**record) for record in manifest["shards"]]
    return State(settings, list(records), _read_failures(out / FAILURES))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Raises UserError if another process is in `folder`; the kernel frees it when that dies."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise UserError(f"another make_shards is writing to {folder}.") from error
    try:
        yield
    finally:
        os.close(fd)


def _check_same(found: dict[str, Any], wanted: Settings, folder: Path) -> None:
    differ = [name for name in wanted if found.get(name) != wanted[name]]
    if differ:
        listed = ", ".join(f"{name} {found.get(name)!r}, now {wanted[name]!r}" for name in differ)
        raise UserError(
            f"{folder} was written from another source or with other settings: {listed}. Choose "
            "another OUT, or remove that folder."
        )


def _read_failures(path: Path) -> list[Failure]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [Failure(*row) for row in list(csv.reader(file))[1:]]
