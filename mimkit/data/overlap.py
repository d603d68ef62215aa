"""Whether images are both trained on and held out: a look at a few, at the start of a run."""

from typing import NamedTuple

import numpy as np

from mimkit.data.decode import DecodeError
from mimkit.data.sources import Source
from mimkit.data.tars import LocalTar

_COMPARED = 32


class Shared(NamedTuple):
    """Of the keys that both sources have, some were compared by the bytes of their images."""

    keys: int
    compared: int
    same: int

    @property
    def estimate(self) -> int:
        """Images that both have, if the others are as those that were compared."""
        return round(self.keys * self.same / self.compared) if self.compared else 0


def shared_images(train: Source, heldout: Source) -> Shared:
    """Equal keys alone mean little: CIFAR-10's splits number theirs alike. Nothing is fetched."""
    place = {key: number for number, key in enumerate(train.keys)}
    pairs = [(place[key], n) for n, key in enumerate(heldout.keys) if key in place]
    local = [pair for pair in pairs if _is_near(train, pair[0]) and _is_near(heldout, pair[1])]
    places = np.linspace(0, len(local) - 1, min(_COMPARED, len(local))).astype(int)
    chosen = np.unique(places).tolist()
    same = sum(_equal(train, heldout, *local[number]) for number in chosen)
    return Shared(len(pairs), len(chosen), same)


def _is_near(source: Source, number: int) -> bool:
    tar = source.tar_of(number)
    return tar is None or isinstance(tar, LocalTar)


def _equal(train: Source, heldout: Source, one: int, other: int) -> bool:
    try:
        return train[one].image == heldout[other].image
    except DecodeError:  # bad samples are told when their turn comes
        return False
