"""Which samples a run trains on and which it holds out: chosen by their keys.

A sample's place in the choice is a hash of its key, so it depends neither on the order of shards
nor on what else is in the set.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import NO_LABEL
from mimkit.data._shares import divide
from mimkit.data.sources import Source
from mimkit.data.subset import SubsetSource
from mimkit.errors import UserError

Numbers = NDArray[np.int64]


def split_heldout(source: Source, *, fraction: float) -> tuple[Source, Source]:
    """(the others, those whose key has a hash below `fraction`).

    About that share of the samples; whether one is held out never changes when others are added,
    and what is held out at a fraction is held out at every larger one.

    Raises:
        UserError: one of the two parts is empty.
    """
    hashes = _hashes(source.keys, purpose=b"mimkit-heldout")
    is_out = hashes < fraction * 2.0**64
    if is_out.all() or not is_out.any():
        raise UserError(
            f"data.heldout_fraction={fraction:g} of {len(source)} samples holds out "
            f"{int(is_out.sum())} of them, which leaves nothing to "
            f"{'train on' if is_out.all() else 'judge by'}; choose another fraction, or set it to "
            "null and name held-out shards in data.heldout."
        )
    kept, out = np.flatnonzero(~is_out), np.flatnonzero(is_out)
    return SubsetSource(source, kept), SubsetSource(source, out)


def take_few(source: Source, limit: int) -> Source:
    """`limit` samples, those whose keys have the smallest hashes; all where there are no more.

    Not the first ones, which are of one class where shards are sorted by class.
    """
    if limit >= len(source):
        return source
    hashes = _hashes(source.keys, purpose=b"mimkit-judged")
    return SubsetSource(source, np.sort(np.argsort(hashes, kind="stable")[:limit]))


def take(
    source: Source,
    subset: float | str | None,
    *,
    stratified: bool = False,
    seed: int = 0,
    taken_out: Source | None = None,
) -> Source:
    """A fraction of `source`, or what a file lists; None is all. See the two functions below.

    Args:
        taken_out: what was held out of the same samples, for messages.
    """
    if subset is None:
        return source
    if isinstance(subset, str):
        return take_listed(source, Path(subset), taken_out=taken_out)
    return take_fraction(source, fraction=subset, stratified=stratified, seed=seed)


def take_fraction(source: Source, *, fraction: float, stratified: bool, seed: int) -> Source:
    """round(fraction * n) samples of each set, those with the smallest hashes under `seed`.

    So a smaller fraction is a part of every larger one. Stratified, every class of a set gives its
    share of that number, by largest remainders; at most one image of a class is then not in a
    larger fraction.

    Raises:
        UserError: nothing is left of a set, or there are no labels to stratify by.
    """
    hashes = _hashes(source.keys, purpose=b"mimkit-subset", seed=seed)
    labels = source.labels
    if stratified and (unlabelled := int((labels == NO_LABEL).sum())):
        raise UserError(
            f"data.stratified=true needs a label for every sample, but {unlabelled} of "
            f"{len(source)} in data.train have none; set it to false, or write the shards with "
            "labels (class subfolders, .cls or .json members)."
        )
    chosen: list[Numbers] = []
    for part in source.sets:
        numbers = np.arange(part.first, part.last)
        total = round(fraction * len(numbers))
        if not total:
            raise UserError(
                f"data.subset={fraction:g} of the {len(numbers)} samples of a set is none; choose "
                "a larger fraction, or leave that set out."
            )
        groups = list(_classes(numbers, labels)) if stratified else [numbers]
        for group, count in zip(groups, divide(total, [len(g) for g in groups]), strict=True):
            chosen.append(group[np.argsort(hashes[group], kind="stable")[:count]])
    return SubsetSource(source, np.concatenate(chosen))


def take_listed(source: Source, path: Path, *, taken_out: Source | None = None) -> Source:
    """The samples whose keys stand in the text file `path`, one a line, in the source's order.

    Raises:
        UserError: no such file; no key in it, one twice, one that no sample or several have.
    """
    wanted = _read_keys(path)
    places: dict[str, list[int]] = {key: [] for key in wanted}
    for number, key in enumerate(source.keys):
        if key in places:
            places[key].append(number)
    if unknown := [key for key, numbers in places.items() if not numbers]:
        raise UserError(_unknown(unknown, len(wanted), path, source, taken_out))
    if shared := [key for key, numbers in places.items() if len(numbers) > 1]:
        raise UserError(
            f"data.subset={path} cannot tell samples of several sets apart that have the same key: "
            f"{_few(shared)}; write one of the sets again with other keys."
        )
    return SubsetSource(source, [numbers[0] for numbers in places.values()])


def _classes(numbers: Numbers, labels: NDArray[np.int64]) -> Iterator[Numbers]:
    """`numbers` by label, ascending."""
    order = numbers[np.argsort(labels[numbers], kind="stable")]
    bounds = np.flatnonzero(np.diff(labels[order])) + 1
    yield from np.split(order, bounds)


def _hashes(keys: Sequence[str], *, purpose: bytes, seed: int = 0) -> NDArray[np.uint64]:
    """64 bits a key: blake2b."""
    blank = hashlib.blake2b(digest_size=8, person=purpose, key=seed.to_bytes(8, "little"))
    digests = bytearray()
    for key in keys:
        digest = blank.copy()
        digest.update(key.encode("utf-8", "surrogateescape"))
        digests += digest.digest()
    return np.frombuffer(bytes(digests), "<u8")


def _read_keys(path: Path) -> list[str]:
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"data.subset={path} cannot be read: {reason}; expected a fraction in (0, 1], or a "
            "text file with one key a line."
        ) from error
    keys = [line.strip() for line in text.split("\n") if line.strip()]
    if not keys:
        raise UserError(f"data.subset={path} holds no key; expected one a line.")
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise UserError(f"data.subset={path} names keys more than once: {_few(twice)}.")
    return keys


def _unknown(
    unknown: list[str], total: int, path: Path, source: Source, taken_out: Source | None
) -> str:
    text = f"data.subset={path}: {len(unknown)} of its {total} keys are not trained on: "
    text += f"{_few(unknown)}. Keys of data.train look like '{source.keys[0]}'."
    held = set(unknown).intersection([] if taken_out is None else taken_out.keys)
    if held:
        text += f" {len(held)} of them are held out by data.heldout_fraction."
    return text + " Take them out of the list."


def _few(keys: list[str]) -> str:
    more = f" and {len(keys) - 5} more" if keys[5:] else ""
    return ", ".join(f"'{key}'" for key in keys[:5]) + more
