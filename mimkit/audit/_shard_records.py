"""A tar against what is written down about it: its index, and the manifest beside it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mimkit.audit._shard_findings import Finding
from mimkit.data.index import ShardIndex, index_paths, is_fresh, read_index
from mimkit.data.manifest import MANIFEST, check_bytes, check_count, read_manifest, shard_entry
from mimkit.errors import UserError

Check = Literal["ok", "old", "wrong", "none"]  # none: there is nothing to compare with
BAD_LABEL = -2


class Image(NamedTuple):
    """The image of one sample, and its label."""

    key: str
    extension: str
    offset: int  # bytes
    size: int  # bytes
    label: int  # NO_LABEL where there is none, BAD_LABEL where it is no number


def rest(error: UserError, path: Path) -> str:
    """The message without the path that it begins with."""
    text = str(error)
    for beginning in (f"bad checksum: {path} ", f"{path} is ", f"{path}: ", f"{path} "):
        text = text.removeprefix(beginning)
    return text


def known_manifest(folder: Path) -> dict[str, Any]:
    """Empty where it cannot be read: `manifests` says so."""
    try:
        return read_manifest(folder)
    except UserError:
        return {}


def manifests(paths: Sequence[Path]) -> Iterator[Finding]:
    """Manifests beside the tars that cannot be read."""
    for folder in dict.fromkeys(path.parent for path in paths):
        try:
            read_manifest(folder)
        except UserError as error:
            path = folder / MANIFEST
            yield Finding("bad_manifest", str(path), detail=rest(error, path))


def compare_manifest(path: Path, *, num_images: int) -> tuple[Check, list[Finding]]:
    manifest, found = known_manifest(path.parent), []
    entry = shard_entry(path) if manifest else {}
    if not entry:
        if manifest.get("shards"):
            detail = "manifest.json beside it does not name it: there is no SHA-256 to compare with"
            found.append(Finding("not_in_manifest", str(path), detail=detail))
        return "none", found
    checksum: Check = "ok" if isinstance(entry.get("sha256"), str) else "none"
    try:
        check_bytes(path)
    except UserError as error:
        checksum = "wrong"
        found.append(Finding("checksum_mismatch", str(path), detail=rest(error, path)))
    try:
        check_count(path, num_samples=num_images)
    except UserError as error:
        found.append(Finding("count_mismatch", str(path), detail=rest(error, path)))
    return checksum, found


def compare_index(path: Path, images: list[Image], cache_dir: Path) -> tuple[Check, list[Finding]]:
    """Training reads the first fresh index, beside the tar or in the cache, and believes it."""
    beside, cached = index_paths(path, cache_dir=cache_dir)
    outdated = _outdated(path, images, beside)
    verdict: Check = "none"
    if outdated is not None:
        verdict = "old" if outdated.kind == "old_index" else "wrong"
    found = [outdated] if outdated else []
    for place in (beside, cached):
        index = read_index(place)
        if index is not None and is_fresh(index, path):
            difference = _first_difference(index, images)
            if difference is None:
                return ("ok" if verdict == "none" else verdict), found
            return "wrong", [*found, _wrong(path, images, place, *difference)]
    return verdict, found


def _outdated(path: Path, images: list[Image], place: Path) -> Finding | None:
    """What there is to say about the index at `place` if training would make it again."""
    if not place.exists():
        return None
    index = read_index(place)
    if index is None:
        detail = "the index is damaged or of another version; it will be made again"
        return Finding("old_index", str(path), detail=detail)
    if is_fresh(index, path):
        return None
    difference = _first_difference(index, images)
    if difference is None:
        detail = "the index says the same as the tar, but names another time of change (a copy?)"
        return Finding("old_index", str(path), detail=f"{detail}; it will be made again")
    sizes = f"of {index.tar_size:,} bytes (this has {path.stat().st_size:,})"
    detail = f"{place.name} was made for another tar, {sizes}: {difference[1]}"
    return Finding("stale_index", str(path), detail=detail)


def _wrong(path: Path, images: list[Image], place: Path, number: int | None, text: str) -> Finding:
    detail = f"{place.name}: {text}"
    if number is None:
        return Finding("wrong_index", str(path), detail=detail)
    return Finding("wrong_index", str(path), images[number].key, images[number].offset, detail)


def _first_difference(index: ShardIndex, images: list[Image]) -> tuple[int | None, str] | None:
    """The number of the first sample that differs, None if their number does; and what does."""
    if len(index) != len(images):
        return None, f"it lists {len(index):,} samples, the tar holds {len(images):,}"
    columns: dict[str, list[object]] = {
        "keys": [image.key.encode() for image in images],
        "extensions": [image.extension.encode() for image in images],
        "offsets": [image.offset for image in images],
        "sizes": [image.size for image in images],
        "labels": [image.label for image in images],
    }
    for name, expected in columns.items():
        listed: list[object] = getattr(index, name).tolist()
        if listed != expected:
            number = next(n for n, value in enumerate(expected) if listed[n] != value)
            found = f"{name}[{number}] is {listed[number]!r}"
            return number, f"{found}, in the tar {expected[number]!r}"
    return None


def missing_tars(paths: Sequence[Path]) -> Iterator[Finding]:
    """Tars that a manifest names beside those of the same split, and that are not there."""
    for folder in dict.fromkeys(path.parent for path in paths):
        here = {path.name for path in paths if path.parent == folder}
        listed = known_manifest(folder).get("shards")
        entries = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
        splits = {entry.get("split") for entry in entries if entry.get("shard") in here}
        for entry in entries:
            name = str(entry.get("shard"))
            if entry.get("split") in splits and not (folder / name).exists():
                detail = f"manifest.json names it, with {entry.get('samples')} samples"
                yield Finding("missing_shard", str(folder / name), detail=detail)
