"""A whole number cut into whole numbers by shares."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def divide(total: int, sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """`total` <= sum of `sizes`, divided in proportion to them: each gets its exact share rounded
    down, and those with the largest remainders one more (of equal ones, the earlier)."""
    sizes = np.asarray(sizes, np.int64)
    counts: NDArray[np.int64]
    counts, remainders = np.divmod(total * sizes, sizes.sum())
    left = total - int(counts.sum())
    counts[np.argsort(-remainders, kind="stable")[:left]] += 1
    return counts
