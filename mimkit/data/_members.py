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
_LONGEST_LABEL = 1 << 20  # bytes


def image_member(sample: Mapping[str, Member]) -> Member | None:
    """`sample`: the members of one key by extension."""
    return next((sample[name] for name in IMAGE_EXTENSIONS if name in sample), None)


def label_of(sample: Mapping[str, Member], *, fd: int, shard: Path) -> int:
    """The integer in `.cls`, or under "label" or "cls" in `.json`; NO_LABEL if there is none.

    Raises:
        UserError: `.cls` is not an integer.
    """
    if "cls" in sample:
        content = _read(sample["cls"], fd, shard).strip()
        try:
            return int(content)
        except ValueError as error:
            raise UserError(
                f"{shard}: the label '{sample['cls'].key}.cls' is {content[:40]!r}; expected an "
                "integer in ASCII, the number of the class."
            ) from error
    return _json_label(_read(sample["json"], fd, shard)) if "json" in sample else NO_LABEL


def _json_label(content: bytes) -> int:
    """Captions and other records without an integer label are no labels."""
    try:
        record = json.loads(content)
    except ValueError:
        return NO_LABEL
    values = [record.get("label"), record.get("cls")] if isinstance(record, dict) else []
    numbers = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
    return numbers[0] if numbers else NO_LABEL


def _read(member: Member, fd: int, shard: Path) -> bytes:
    if member.size > _LONGEST_LABEL:
        raise UserError(
            f"{shard}: '{member.key}.{member.extension}' has {member.size} bytes; a label has few."
        )
    return os.pread(fd, member.size, member.offset)


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
