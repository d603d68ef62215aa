"""Labels: whether every image has one, whether classes.json names it, how they lie in the tars."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mimkit.audit._shard_findings import Finding
from mimkit.audit._shard_records import known_manifest, rest
from mimkit.audit._shard_samples import Samples
from mimkit.batch import NO_LABEL
from mimkit.data.manifest import CLASSES, read_classes
from mimkit.errors import UserError

# A label dominates a tar with more than this share of it, if it has not half of that in the set.
_DOMINANT = 0.5


@dataclass(frozen=True)
class Labels:
    """Attributes:
    counts: images by label.
    names: of the labels 0, 1, ..., from classes.json; empty where there is none.
    without: images that have no label, or a bad one.
    same_everywhere: p-value of Pearson's chi-square test that labels are spread over the tars by
        chance: small where they are not. None for a single tar or label. It is rough where tars
        have less than about one image of a label.
    most_frequent: of each sound tar, the label it has most often.
    most_share: the share of its labelled images that have it.
    """

    counts: dict[int, int]
    names: tuple[str, ...]
    without: int
    same_everywhere: float | None
    most_frequent: tuple[int, ...]
    most_share: tuple[float, ...]


def label_facts(samples: Samples) -> Labels | None:
    """None where no image has a label."""
    known = samples.labels != NO_LABEL
    if not known.any():
        return None
    tops = []
    for labels in np.split(samples.labels, samples.groups[1:-1]):
        found = Counter(labels[labels != NO_LABEL].tolist())
        label, count = max(found.items(), key=lambda item: item[1], default=(NO_LABEL, 0))
        tops.append((label, count / max(1, found.total())))
    tar_of = np.repeat(np.arange(len(samples.tars)), np.diff(samples.groups))
    return Labels(
        counts=dict(sorted(Counter(samples.labels[known].tolist()).items())),
        names=tuple(_names(samples.tars[0].parent)[0]),
        without=int((~known).sum()),
        same_everywhere=same_everywhere(tar_of[known], samples.labels[known]),
        most_frequent=tuple(label for label, _ in tops),
        most_share=tuple(share for _, share in tops),
    )


def _names(folder: Path) -> tuple[list[str], list[Finding]]:
    """Of the classes, and what is wrong with their file."""
    try:
        return read_classes(folder), []
    except UserError as error:
        path = folder / CLASSES
        return [], [Finding("bad_classes", str(path), detail=rest(error, path))]


def same_everywhere(tar_S: NDArray[np.int64], label_S: NDArray[np.int64]) -> float | None:
    """p-value of Pearson's chi-square test of independence; None with one tar or one label.

    X^2 = S (sum over tars and labels of n^2 / (row sum * column sum) - 1): cells without images
    add nothing, so the table, which may have 10^8 cells, is never written out.
    """
    from scipy.stats import chi2  # here, because it is slow to import

    _, tar_S, tar_counts = np.unique(tar_S, return_inverse=True, return_counts=True)
    _, label_S, label_counts = np.unique(label_S, return_inverse=True, return_counts=True)
    freedom = (len(tar_counts) - 1) * (len(label_counts) - 1)
    if not freedom:
        return None
    cell, count = np.unique(tar_S * len(label_counts) + label_S, return_counts=True)
    row, column = np.divmod(cell, len(label_counts))
    expected = tar_counts[row] * label_counts[column] / len(tar_S)
    statistic = (count**2 / expected).sum() - len(tar_S)
    return float(chi2.sf(statistic, freedom))


def label_findings(samples: Samples, labels: Labels) -> Iterator[Finding]:
    """What is wrong or odd about the labels of a set that has any."""
    share = f"{len(samples) - labels.without:,} of {len(samples):,} images"
    for number in np.flatnonzero(samples.labels == NO_LABEL).tolist():
        if samples.images[number].label == NO_LABEL:  # a bad one was found with its tar
            yield samples.finding(number, "label_missing", f"it has no label; {share} have one")
    yield from _out_of_range(samples, labels)
    folder = samples.tars[0].parent
    yield from _names(folder)[1]
    empty = [name for number, name in enumerate(labels.names) if number not in labels.counts]
    if empty:
        detail = "a class of classes.json without any image"
        yield Finding("empty_class", str(folder), empty[0], detail=detail, count=len(empty))
    stated = known_manifest(folder).get("classes")
    if labels.names and isinstance(stated, int) and stated != len(labels.names):
        names = f"classes.json has {len(labels.names)} names"
        detail = f"{names}, but manifest.json beside it says {stated} classes"
        yield Finding("class_count", str(folder), detail=detail)
    yield from _dominated(samples, labels)


def _out_of_range(samples: Samples, labels: Labels) -> Iterator[Finding]:
    most = len(labels.names) - 1
    for number in np.flatnonzero(samples.labels > most).tolist() if labels.names else ():
        detail = f"its label is {samples.labels[number]}, but classes.json names 0..{most}"
        yield samples.finding(number, "label_out_of_range", detail)


def _dominated(samples: Samples, labels: Labels) -> Iterator[Finding]:
    total = sum(labels.counts.values())
    tops = zip(samples.tars, labels.most_frequent, labels.most_share, strict=True)
    for tar, label, share in tops:
        if share > _DOMINANT and labels.counts[label] / total < share / 2:
            detail = "most of its images have one label, less than half as common in the set"
            yield Finding("dominated_shard", str(tar), detail=detail)


def compare_classes(folders: Sequence[Path]) -> Iterator[Finding]:
    """Folders of one training whose classes.json name other classes than the first's."""
    first, _ = _names(folders[0])
    for folder in folders[1:]:
        classes, trouble = _names(folder)
        yield from trouble
        if classes and first and classes != first:
            names = f"its classes.json names {len(classes)} classes, that in {folders[0]} names"
            detail = f"{names} {len(first)}, and not the same in the same order"
            yield Finding("classes_differ", str(folder), detail=detail)
