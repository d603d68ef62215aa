"""What is wrong with a set of shards, or worth knowing: each with its place in a tar."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

# What to do about a kind of problem, where its detail does not say it already.
REMEDIES = {
    "class_count": "write classes.json again: one name for each label, in their order",
    "classes_differ": "number the classes alike, or a label means one thing here and another there",
    "duplicate_key": "leave one of the shards out, or write the set again with "
    "tools/make_shards.py, which gives every image a key of its own",
    "image_size": "leave these images out, or make them again in a usual size, and write the set "
    "again with tools/make_shards.py",
    "label_missing": "give every sample a label, or none",
    "label_out_of_range": "mend the labels, or classes.json",
    "leak_between_splits": "leave these images out of one split, or its numbers are too good",
    "missing_shard": "fetch the shards that are missing, or correct manifest.json",
    "stale_index": "find out which of the two is right; then remove the index, which is made again",
    "undecodable": "tools/make_shards.py writes the set without such images and lists them; "
    "data.on_bad_sample=substitute trains on their neighbours instead",
    "wrong_index": "remove the index: it is made again on first use",
}

# Kinds that are worth knowing and harm no training; all others make a set unfit.
WARNINGS = frozenset({
    "cmyk_image", "constant_image", "dominated_shard", "duplicate_content", "empty_class",
    "exif_orientation", "grey_image", "key_in_both_splits", "not_in_manifest", "old_index",
    "sample_without_image", "small_image", "suspicious_file", "suspicious_name",
    "uneven_shards", "unread_member", "window_too_small", "wrong_extension",
})  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A problem, which makes a set unfit for training, or a warning.

    Attributes:
        kind: a word for all of this kind; whether they are warnings, see `WARNINGS`.
        shard: the tar, or the folder where all of it is meant.
        key: of the sample; "" where it is not about one.
        offset: in the tar, in bytes: of a bad header, or of the sample's data; None where the
            whole tar or set is meant.
        detail: what was found and what was expected.
        count: how many of these there are; key and offset are the first one's.
    """

    kind: str
    shard: str
    key: str = ""
    offset: int | None = None
    detail: str = ""
    count: int = 1


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Those of one kind and detail become one, at the place of the first, with their count."""
    merged: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        name = (finding.kind, finding.detail)
        first = merged.get(name)
        merged[name] = replace(first, count=first.count + finding.count) if first else finding
    return list(merged.values())
