"""Which member of a sample is its image, and which number is its label."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from mimkit.batch import NO_LABEL
from mimkit.data.tar import Member
from mimkit.errors import UserError

# Where a sample has several of these, the first in this order is its image.
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
# Where a record has several of these, the first in this order is its label: `label` is what timm's
# shards say and what a column `label` becomes in img2dataset's.
LABEL_KEYS = ("label", "cls", "class")
_MOST_CLASSES = 2**31
_LONGEST = {"cls": 64, "json": 1 << 20}  # bytes; img2dataset's records with EXIF have some kB


def image_member(sample: Mapping[str, Member]) -> Member | None:
    """`sample`: the members of one key by extension."""
    return next((sample[name] for name in IMAGE_EXTENSIONS if name in sample), None)


def label_of(sample: Mapping[str, Member], *, fd: int, shard: Path) -> int:
    """The integer in `.cls`, or else under one of `LABEL_KEYS` in `.json`; NO_LABEL without one.

    Captions and other records without such a number are no labels.

    Raises:
        UserError: `.cls` is not an integer, `.json` is not JSON, one of them is too long, or the
            number is none of a class.
    """
    for extension, parse in (("cls", _from_text), ("json", _from_record)):
        if extension in sample:
            member = sample[extension]
            where = f"{shard}: the label in '{member.key}.{extension}'"
            if member.size > _LONGEST[extension]:
                raise UserError(
                    f"{where} has {member.size} bytes; at most {_LONGEST[extension]} are read. "
                    "Write the number of the class into a .cls member."
                )
            return parse(os.pread(fd, member.size, member.offset), where)
    return NO_LABEL


def _from_text(content: bytes, where: str) -> int:
    try:
        number = int(content)
    except ValueError as error:
        raise UserError(
            f"{where} is {content[:40]!r}; expected an integer in ASCII, the number of the class."
        ) from error
    return _checked(number, where)


def _from_record(content: bytes, where: str) -> int:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:  # also what is no UTF-8, and endless brackets
        raise UserError(f"{where} is no JSON ({str(error)[:80]}); write it again.") from error
    values = [record.get(key) for key in LABEL_KEYS] if isinstance(record, dict) else []
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return _checked(numbers[0], where) if numbers else NO_LABEL


def _checked(label: float, where: str) -> int:
    if isinstance(label, float) or not NO_LABEL <= label < _MOST_CLASSES:
        raise UserError(
            f"{where} is {label}; expected an integer from 0 to {_MOST_CLASSES - 1}, the number of "
            f"the class, or {NO_LABEL} for none."
        )
    return label


def no_image(shard: Path, samples: list[dict[str, Member]]) -> UserError:
    """The error for a shard in which no member has an image's extension."""
    found = sorted({extension for sample in samples for extension in sample})
    listed = ", ".join("." + name for name in found[:8]) + (", ..." if len(found) > 8 else "")
    dotted = any(name.rpartition(".")[2] in IMAGE_EXTENSIONS for name in found)
    hint = (
        "A key ends at the first dot of the file name: names with more dots are not images of "
        "their own. "
        if dotted
        else ""
    )
    return UserError(
        f"{shard} holds no image: expected members .{', .'.join(IMAGE_EXTENSIONS)}, found "
        f"{listed or 'none'}. {hint}tools/make_shards.py writes shards from a folder of images."
    )
