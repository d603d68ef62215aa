"""Images of one split that are in another too, by what is in them: all bytes are hashed."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from mimkit.data.sources import Source

_SAID = 1000  # images between two words about progress


class Double(NamedTuple):
    """Keys of an image that both splits have, byte for byte, and its labels there."""

    train_key: str
    key: str
    train_label: int
    label: int


def doubles(
    train: Source, judged: Source, *, progress: Callable[[int, int], object] = lambda done, of: None
) -> list[Double]:
    """Each image of `judged` that `train` has too, whatever its key is there.

    An image that was resized or compressed again is not found (`mimkit audit shards --against`
    also compares pixels).

    Args:
        progress: told how many of how many images were read.
    """
    total, seen = len(train) + len(judged), dict[bytes, int]()
    for number in range(len(train)):
        seen.setdefault(_content(train, number), number)
        _tell(number + 1, total, progress)
    found = []
    for number in range(len(judged)):
        earlier = seen.get(_content(judged, number))
        if earlier is not None:
            one, other = train[earlier], judged[number]
            found.append(Double(one.key, other.key, one.label, other.label))
        _tell(len(train) + number + 1, total, progress)
    return found


def _content(source: Source, number: int) -> bytes:
    return hashlib.blake2b(source[number].image, digest_size=16).digest()


def _tell(done: int, total: int, progress: Callable[[int, int], object]) -> None:
    if done % _SAID == 0 or done == total:
        progress(done, total)
