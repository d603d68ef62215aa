"""Pictures that a set has twice, or that are in two splits.

Compared are the encoded bytes of all images, and the pixels of those that were decoded: a picture
that was encoded again without loss, or has other metadata, is found too. One that was resized or
compressed again is not.
"""

from collections.abc import Iterator, Sequence

from mimkit.audit._shard_findings import Finding
from mimkit.audit._shard_images import Look
from mimkit.audit._shard_samples import Samples

_SAME_KEY = (
    "the other split has this key too, with other bytes: either each split is numbered by itself, "
    "which harms nothing, or it is the same image, compressed again"
)


def duplicate_contents(samples: Samples, looks: Sequence[Look]) -> Iterator[Finding]:
    """A picture that an earlier sample of the set shows already."""
    seen: dict[bytes, int] = {}
    for number, look in enumerate(looks):
        earlier = _find(seen, look)
        for digest in _digests(look):
            seen.setdefault(digest, number)
        if earlier is not None:
            first, one, other = samples.images[earlier], *samples.labels[[earlier, number]]
            detail = f"{_how(looks[earlier], look)} as '{first.key}' in {samples.tar_of(earlier)}"
            if one != other:
                detail += f", which has label {one}; this has {other}"
            yield samples.finding(number, "duplicate_content", detail)


def leaks(
    samples: Samples, looks: Sequence[Look], others: Samples, their_looks: Sequence[Look]
) -> Iterator[Finding]:
    """Pictures of `samples` that `others`, another split, have too; and keys, as warnings: many
    sets number their images from 0 in every split."""
    seen: dict[bytes, int] = {}
    for number, look in enumerate(their_looks):
        for digest in _digests(look):
            seen.setdefault(digest, number)
    keys = {image.key for image in others.images}
    for number, (image, look) in enumerate(zip(samples.images, looks, strict=True)):
        picture = _find(seen, look)
        if picture is not None:
            other = others.images[picture]
            where = f"'{other.key}' in {others.tar_of(picture)} at byte {other.offset}"
            detail = f"{_how(their_looks[picture], look)} as {where}"
            yield samples.finding(number, "leak_between_splits", detail)
        elif image.key in keys:
            yield samples.finding(number, "key_in_both_splits", _SAME_KEY)


def _digests(look: Look) -> list[bytes]:
    return [digest for digest in (look.of_bytes, look.of_pixels) if digest]


def _find(seen: dict[bytes, int], look: Look) -> int | None:
    return next((seen[digest] for digest in _digests(look) if digest in seen), None)


def _how(one: Look, other: Look) -> str:
    same_bytes = one.of_bytes == other.of_bytes
    return "the same bytes" if same_bytes else "the same pixels, in other bytes,"
