"""A mask chooses which patches the encoder must predict. Contract, and the registry."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import Grid
from mimkit.random import Rng
from mimkit.registry import Registry


def beits_share(grid: Grid) -> int:
    """BEiT masks 75 of 14 x 14 patches; as many of another grid, 1 at least."""
    return max(1, round(grid[0] * grid[1] * 75 / 196))


class Mask(ABC):
    """mask(rng) -> bool array of N = rows x columns patches, row by row, True where masked.

    Every mask takes `grid` and `num_masked` as keyword arguments. `exact` masks have exactly
    `num_masked` patches in every draw; requests that cannot be met are refused at construction.
    """

    grid: Grid
    num_masked: int
    exact: bool = True

    @abstractmethod
    def __call__(self, rng: Rng) -> NDArray[np.bool_]: ...


MASKS: Registry[Callable[..., Mask]] = Registry("mask", __name__)
