"""The order of samples: a pure function of (seed, epoch), and an endless stream of positions."""

import numpy as np
from numpy.typing import NDArray

from mimkit.errors import UserError
from mimkit.random import Purpose, generator


class Order:
    """Position p of the stream is sample `epoch_order(p // N)[p % N]`; every epoch has each once.

    The shards of an epoch are permuted and taken `window` at a time; the samples of a window are
    permuted. A window that holds all shards is a full shuffle; a small one reads only a few files
    at a time, which matters on spinning disks and network file systems.

    Args:
        groups: bounds of the shards, 0, ..., N (see `Source.groups`).
        seed: with the epoch, the key of the permutation.
        window: shards that are mixed with each other.
    """

    def __init__(self, *, groups: NDArray[np.int64], seed: int, window: int) -> None:
        if window < 1:
            raise UserError(f"data.window is {window}; expected the number of shards to mix, >= 1.")
        self._groups, self._seed, self._window = groups, seed, window
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Samples in an epoch."""
        return int(self._groups[-1])

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, number of the sample) at `position` >= 0 of the endless stream."""
        epoch, place = divmod(position, len(self))
        return epoch, int(self.epoch_order(epoch)[place])

    def epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """The permutation of `epoch`; the last two that were asked for are kept."""
        if epoch not in self._epochs:
            kept = {e: order for e, order in self._epochs.items() if e == epoch - 1}
            self._epochs = {**kept, epoch: self._permute(epoch)}
        return self._epochs[epoch]

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        rng = generator(Purpose.ORDER, seed=self._seed, epoch=epoch)
        shards = rng.permutation(len(self._groups) - 1)
        windows = []
        for first in range(0, len(shards), self._window):
            chosen = shards[first : first + self._window]
            spans = [np.arange(self._groups[s], self._groups[s + 1]) for s in chosen]
            samples = np.concatenate(spans)
            rng.shuffle(samples)
            windows.append(samples)
        return np.concatenate(windows)
