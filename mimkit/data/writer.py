"""Writing shards: each whole or not at all, with its index, and a manifest when all are done."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mimkit.batch import NO_LABEL
from mimkit.data.index import index_path, make_index, save_index
from mimkit.data.manifest import CLASSES, MANIFEST
from mimkit.files import replacing, sha256

FAILURES = "failures.csv"


class Item(NamedTuple):
    """What becomes one sample of a shard."""

    key: str  # unique, without dots
    image: bytes  # encoded
    extension: str  # what the image is: "jpg", "png" or "webp"
    label: int


class Failure(NamedTuple):
    """An image that was left out, and why."""

    key: str
    origin: str
    cause: str


@dataclass(frozen=True)
class ShardRecord:
    """A shard as manifest.json describes it."""

    shard: str  # file name
    split: str
    samples: int
    bytes: int
    sha256: str


class _NothingToWriteError(Exception):
    """No item came; `replacing` then leaves nothing."""


def write_shard(path: Path, items: Iterable[Item], *, split: str) -> ShardRecord | None:
    """Writes the tar `path` and its index; None, and no file, if there are no items.

    Equal items give equal bytes: times and owners are fixed. Raises OSError.
    """
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            num_items = _write_tar(file, items)
            if not num_items:
                raise _NothingToWriteError
    except _NothingToWriteError:
        return None
    index = make_index(path)
    assert len(index) == num_items, f"{path}: wrote {num_items} samples, found {len(index)}"
    save_index(index, index_path(path))
    return ShardRecord(path.name, split, num_items, path.stat().st_size, sha256(path))


def _write_tar(file: BinaryIO, items: Iterable[Item]) -> int:
    from webdataset import TarWriter

    num_items = 0
    # PAX equals USTAR until a name is long or not ASCII, where USTAR would fail.
    with TarWriter(file, mtime=0, encoder=False, format="PAX_FORMAT") as tar:
        for item in items:
            label = {} if item.label == NO_LABEL else {"cls": str(item.label).encode()}
            tar.write({"__key__": item.key, item.extension: item.image, **label})
            num_items += 1
    return num_items


def write_manifest(
    folder: Path,
    records: Sequence[ShardRecord],
    *,
    source: str,
    classes: Sequence[str],
    failures: Sequence[Failure] = (),
    settings: dict[str, Any],
) -> None:
    """Writes what describes the shards of `folder`; manifest.json comes last. Raises OSError."""
    splits = {record.split: 0 for record in records}
    for record in records:
        splits[record.split] += record.samples
    manifest = {
        "source": source,
        "shards": [asdict(record) for record in records],
        "samples": splits,
        "classes": len(classes),
        "failures": len(failures),
        "settings": settings,
    }
    if classes:
        write_json(folder / CLASSES, list(classes))
    if failures:
        write_failures(folder / FAILURES, failures)
    write_json(folder / MANIFEST, manifest)


def write_failures(path: Path, failures: Sequence[Failure]) -> None:
    """A table of what was left out, as CSV."""
    table = io.StringIO()
    csv.writer(table).writerows([Failure._fields, *failures])
    _write(path, table.getvalue())


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all. Raises OSError."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    _write(path, text)


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
