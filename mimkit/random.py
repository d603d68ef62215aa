"""The one place where randomness is keyed: (purpose, seed, epoch, sample) -> generator.

Nothing in mimkit draws from a global generator, so what a sample looks like does not depend on
ranks, workers, batch size or on what ran before. Libraries that do are called inside
`seeded_globals`.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Rng = np.random.Generator


class Purpose(IntEnum):
    """What the numbers are for; streams of different purposes never meet. Values are for ever."""

    ORDER = 1
    VIEW = 2
    MASK = 3
    DROP_PATH = 4
    INIT = 5
    GUMBEL = 6
    EMBEDDED_CROPS = 7
    PICTURE = 8
    CODEBOOK = 9
    MIX = 10
    ERASE = 11
    PROBE = 12
    RESAMPLING = 13


def generator(purpose: Purpose, *, seed: int, epoch: int = 0, sample: int = 0) -> Rng:
    """A numpy generator that is a pure function of its four arguments.

    Philox counts upwards in the lowest word of its counter, so the key fields stand in the higher
    words: with the sample in the lowest word, sample i's second block would be sample i+1's first.
    """
    key = np.array([seed, epoch], np.uint64)
    counter = np.array([0, sample, int(purpose), 0], np.uint64)
    return np.random.Generator(np.random.Philox(_Key(key), counter=counter))  # type: ignore[arg-type]


class _Key(np.random.bit_generator.ISeedSequence):
    """Hands Philox its key. `Philox(key=...)` gives the same numbers, but asks the operating system
    for entropy first and throws it away: 6.8 us instead of 1.8."""

    def __init__(self, key: NDArray[np.uint64]) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[np.uint64]:
        assert n_words == len(self._key) and dtype == np.uint64
        return self._key


def torch_generator(
    purpose: Purpose,
    *,
    seed: int,
    epoch: int = 0,
    sample: int = 0,
    device: str | torch.device = "cpu",
) -> torch.Generator:
    """The same key as a torch generator, for draws on the device."""
    draw = generator(purpose, seed=seed, epoch=epoch, sample=sample)
    return torch.Generator(device).manual_seed(int(draw.integers(0, 2**63 - 1)))


@contextmanager
def seeded_globals(rng: Rng) -> Iterator[None]:
    """Inside, the global generators of `random`, numpy and torch (CPU) are seeded from `rng`.

    For timm's augmentations, which draw from them. Afterwards they are as they were.
    """
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seeds = rng.integers(0, 2**32, 3)
    try:
        random.seed(int(seeds[0]))
        np.random.seed(int(seeds[1]))
        torch.default_generator.manual_seed(int(seeds[2]))
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(of_torch)
