"""Which classes there are, and whether every split means the same ones by its labels."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mimkit.batch import NO_LABEL
from mimkit.data.sources import Source
from mimkit.errors import UserError


class Classes(NamedTuple):
    """How many there are, and their names where somebody wrote them down."""

    num: int
    names: tuple[str, ...]


def agreed_classes(splits: Mapping[str, Source], *, stated: int | None) -> Classes:
    """The classes of the first split, which all the others must share.

    Args:
        splits: by the setting that names them ("data.train", ...); trained on is the first.
        stated: how many the configuration says there are; None to believe the data.

    Raises:
        UserError: a split is empty or has images without a label; names of classes differ; a label
            has no class; or the number is not the one that is stated.
    """
    for setting, source in splits.items():
        _check_labelled(setting, source)
    first, *others = splits
    names = splits[first].classes
    for setting in others:
        _check_equal_names(first, names, setting, splits[setting].classes)
    most = {setting: int(source.labels.max()) for setting, source in splits.items()}
    found = len(names) or most[first] + 1
    for setting, label in most.items():
        if label >= found:
            what = (f"classes.json beside {first} names {found} classes" if names
                    else f"{first} has labels up to {most[first]} and no classes.json")  # fmt: skip
            raise UserError(
                f"{setting} has the label {label}, but {what}; give the splits of one data set, or "
                "write them again with tools/make_shards.py"
            )
    _check_stated(stated, found, first, named=bool(names))
    return Classes(found, tuple(names))


def notes_on_classes(splits: Mapping[str, Source], classes: Classes) -> list[str]:
    """What a person should know of the splits of `agreed_classes`: where only numbers of labels
    could be compared, and classes of which the first split has nothing to learn from."""
    first, unnamed = next(iter(splits)), [s for s, source in splits.items() if not source.classes]
    counts_V = np.bincount(splits[first].labels, minlength=classes.num)
    notes = [numbers_alone(unnamed)] if unnamed and len(splits) > 1 else []
    if len(empty := np.flatnonzero(counts_V == 0)):
        shown = [classes.names[n] if classes.names else str(n) for n in empty.tolist()]
        notes.append(f"{len(empty)} of {classes.num} classes have no image in {first}, and cannot "
                     f"be learnt: {_few(shown)}")  # fmt: skip
    return notes


def numbers_alone(unnamed: Sequence[str]) -> str:
    """That these do not name their classes, as a note."""
    return (
        f"{' and '.join(unnamed)} {'name' if unnamed[1:] else 'names'} no classes (no classes.json "
        "beside the images): only the numbers of the labels could be compared, not what they mean"
    )


def _check_labelled(setting: str, source: Source) -> None:
    if not len(source):
        raise UserError(f"{setting} has no images; name shards that have some")
    missing = np.flatnonzero(source.labels == NO_LABEL)
    if not len(missing):
        return
    tars = dict.fromkeys(str(source.tar_of(int(i))) for i in missing)
    where = "" if list(tars) == ["None"] else f", in {len(tars)} shards: {_few(list(tars))}"
    raise UserError(
        f"{setting}: {len(missing)} of {len(source)} images have no label{where}. A classifier "
        "needs one for each (a .cls member or a class subfolder); leave these out, or write the "
        "shards again with tools/make_shards.py"
    )


def _check_equal_names(first: str, names: list[str], other: str, others: list[str]) -> None:
    if not names or not others or names == others:
        return
    shared = min(len(names), len(others))
    place = next((i for i in range(shared) if names[i] != others[i]), shared)
    raise UserError(
        f"{first} and {other} mean different classes by their labels: their classes.json have "
        f"{len(names)} and {len(others)} names, and label {place} is {_at(names, place)} and "
        f"{_at(others, place)}; write both from one list of classes with tools/make_shards.py"
    )


def _check_stated(stated: int | None, found: int, first: str, *, named: bool) -> None:
    if stated in (None, found):
        return
    how = "names" if named else "has labels for"
    where = f"classes.json beside {first}" if named else first
    raise UserError(
        f"model.classes={stated}, but {where} {how} {found} classes; set model.classes=null to "
        "take them from the data" + ("" if named else ", or put a classes.json with all names "
                                     "beside the shards"))  # fmt: skip


def _at(names: list[str], place: int) -> str:
    return f"'{names[place]}'" if place < len(names) else "missing"


def _few(items: list[str]) -> str:
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
