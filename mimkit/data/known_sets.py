"""Sets that papers report on: how many images and classes they have, and what is odd about them.

Counts are those of the official files. The paper's Table 9 has the same for its six transfer sets,
save 3,003 validation images of iNaturalist 2019, where the files have 3,030 (three a class). How
shards are made of each one's official layout: docs/evaluation.md.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimkit.data.sources import Source
from mimkit.errors import UserError
from mimkit.registry import nearest


class KnownSet(NamedTuple):
    """Attributes:
    classes: how many.
    test_images: of the split that is reported.
    about: which split that is.
    numbered: its class folders are called by the numbers of ImageNet's classes, 0, 1, ...; sorted
        as text, as make_shards does, 10 comes before 2.
    """

    classes: int
    test_images: int
    about: str
    numbered: bool = False


KNOWN_SETS = {
    "imagenet": KnownSet(1000, 50_000, "ImageNet-1k, validation"),
    "imagenet-v2": KnownSet(1000, 10_000, "ImageNet-V2, one of its three test sets", numbered=True),
    "inat18": KnownSet(8142, 24_426, "iNaturalist 2018, validation"),
    "inat19": KnownSet(1010, 3_030, "iNaturalist 2019, validation"),
    "cifar10": KnownSet(10, 10_000, "CIFAR-10, test"),
    "cifar100": KnownSet(100, 10_000, "CIFAR-100, test, fine labels"),
    "cars": KnownSet(196, 8_041, "Stanford Cars, test"),
    "flowers": KnownSet(102, 6_149, "Oxford Flowers-102, test"),
}


def known_set(name: str) -> KnownSet:
    """Raises UserError where there is none of this name."""
    if name not in KNOWN_SETS:
        raise UserError(f"there is no set called '{name}'.{nearest(name, list(KNOWN_SETS))} "
                        f"Known: {', '.join(KNOWN_SETS)}")  # fmt: skip
    return KNOWN_SETS[name]


def check_set(name: str, source: Source, *, classes: int) -> list[str]:
    """What a person should know, a line each.

    Raises:
        UserError: the data have another number of classes than the set.
    """
    known = known_set(name)
    if classes != known.classes:
        raise UserError(f"{known.about} has {known.classes} classes, and these shards have "
                        f"{classes}; see docs/evaluation.md for how they are made")  # fmt: skip
    if len(source) != known.test_images:
        return [f"{known.about} has {known.test_images} images, and these shards {len(source)}: "
                "the numbers are not those that papers report"]  # fmt: skip
    return []


def numbered_labels(source: Source) -> NDArray[np.int64]:
    """Labels by the numbers that the class folders are called.

    Raises:
        UserError: the names of the classes are not 0, 1, ... without gaps, in any order.
    """
    names = source.classes
    if sorted(names) != sorted(str(number) for number in range(len(names))) or not names:
        raise UserError(
            f"the class folders of this set are called 0, 1, ..., and these shards have "
            f"{len(names)} classes{f' such as {names[0]!r}' if names else ''} in their "
            "classes.json; make them of the official folders (docs/evaluation.md)"
        )
    return np.array([int(name) for name in names], np.int64)[source.labels]


_VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})")


def real_labels(file: Path, keys: Sequence[str]) -> list[list[int]]:
    """The classes that people see in each image: ImageNet ReaL's `real.json`, by the images' keys.

    Args:
        file: a list of 50,000 lists of classes, in the order of ILSVRC2012_val_00000001, ...
        keys: of the images, with that name in them.

    Raises:
        UserError: the file is something else, or a key has no such name.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if not _is_real(found):
        raise UserError(f"{file} is not ReaL's list: expected 50,000 lists of numbers 0..999")
    numbers = [_VALIDATION.search(key) for key in keys]
    if bad := [key for key, match in zip(keys, numbers, strict=True) if match is None]:
        raise UserError(f"{len(bad)} images have no ILSVRC2012_val_... in their key, such as "
                        f"'{bad[0]}': ReaL's labels go by those names")  # fmt: skip
    return [found[int(match[1]) - 1] for match in numbers if match is not None]


def _is_real(found: object) -> bool:
    return (
        isinstance(found, list)
        and len(found) == 50_000
        and all(isinstance(row, list) and all(isinstance(c, int) and 0 <= c < 1000 for c in row)
                for row in found)
    )  # fmt: skip
