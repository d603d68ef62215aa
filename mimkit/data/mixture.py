"""Several sets of samples as one source, each drawn as often as its weight says."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import NO_LABEL, Sample
from mimkit.data.order import WeightedSet
from mimkit.data.sources import Source
from mimkit.data.tars import Tar
from mimkit.errors import UserError


class Ingredient(NamedTuple):
    """One set of a mixture."""

    name: str  # for messages
    source: Source
    weight: float = 1.0  # times that an epoch has each of its samples
    has_labels: bool = True  # False: as if it had none


class MixtureSource(Source):
    """The samples of all ingredients, one set after the other.

    An epoch of training has each sample of a set `weight` times, see `WeightedSet`; the length of
    an epoch is constant. Two sets may use the same keys.

    Raises:
        UserError: the labels of two sets mean different classes.
    """

    def __init__(self, ingredients: Sequence[Ingredient]) -> None:
        self._ingredients = list(ingredients)
        self._starts = np.cumsum([0, *(len(i.source) for i in ingredients)], dtype=np.int64)
        self._classes = _same_classes(self._ingredients)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ingredient, number = self._find(index)
        sample = ingredient.source[number]
        label = sample.label if ingredient.has_labels else NO_LABEL
        return replace(sample, index=index, label=label)

    def tar_of(self, index: int) -> Tar | None:
        ingredient, number = self._find(index)
        return ingredient.source.tar_of(number)

    def _find(self, index: int) -> tuple[Ingredient, int]:
        """Which set sample `index` is in, and its number there."""
        number = int(np.searchsorted(self._starts, index, "right")) - 1
        return self._ingredients[number], index - int(self._starts[number])

    @property
    def digest(self) -> str:
        """Of the digests of the sets, in order, and how they are used."""
        lines = [f"{i.source.digest} {i.weight!r} {i.has_labels}\n" for i in self._ingredients]
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.concatenate(
            [
                i.source.labels if i.has_labels else np.full(len(i.source), NO_LABEL)
                for i in self._ingredients
            ]
        )

    @property
    def keys(self) -> list[str]:
        return [key for i in self._ingredients for key in i.source.keys]

    @property
    def classes(self) -> list[str]:
        return self._classes

    @property
    def groups(self) -> NDArray[np.int64]:
        starts = zip(self._ingredients, self._starts[:-1], strict=True)
        return np.concatenate([[0], *(i.source.groups[1:] + start for i, start in starts)])

    @property
    def sets(self) -> list[WeightedSet]:
        bounds = zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True)
        return [
            WeightedSet(first, last, ingredient.weight)
            for (first, last), ingredient in zip(bounds, self._ingredients, strict=True)
        ]


def check_weights(source: Source) -> None:
    """UserError where an epoch would have no sample of a set."""
    for part in source.sets:
        if not part.num_drawn:
            raise UserError(
                f"weight {part.weight:g} of the {part.last - part.first} samples of a set in "
                "data.train is less than one sample an epoch; give it a larger weight, or leave it "
                "out."
            )


def _same_classes(ingredients: Sequence[Ingredient]) -> list[str]:
    """The classes of all that name theirs."""
    named = [i for i in ingredients if i.has_labels and i.source.classes]
    for other in named[1:]:
        if other.source.classes != named[0].source.classes:
            raise UserError(
                "the labels of the sets in data.train mean different classes: "
                f"{_listed(named[0])}, but {_listed(other)} (their classes.json). Write them again "
                "with the same classes, or set `labels: false` for all but one of them."
            )
    return named[0].source.classes if named else []


def _listed(ingredient: Ingredient) -> str:
    names = ingredient.source.classes
    first = ", ".join(names[:5]) + (", ..." if names[5:] else "")
    return f"{ingredient.name} has {len(names)} ({first})"
