"""BEiT's rule for relative positions on a larger grid (unilm, run_class_finetuning).

Apart from `resize`, whose source travels with exports: scipy does not.
"""

import numpy as np
import torch
from torch import Tensor

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.models.resize import resize_maps


def resize_geometric(table_PK: Tensor, *, old: Grid, new: Grid) -> Tensor:
    """A relative table for a grid of `old` patches -> for a larger one of `new` patches.

    Offsets near zero keep their place, and distances between those further out grow by a constant
    ratio so that the last ones reach the new edge.

    Raises:
        UserError: the grid becomes smaller, for which the rule is not made.
    """
    return resize_maps(table_PK, _geometric, old=old, new=new)


def _geometric(maps_Kyx: Tensor, *, old: Grid, new: Grid) -> Tensor:
    """Cubic splines through the old numbers at their new places, read at every whole offset."""
    from scipy.interpolate import RectBivariateSpline

    if any(after < before for before, after in zip(old, new, strict=True)):
        raise UserError(
            f"model.resize=geometric is BEiT's rule for larger images, and the grid goes from "
            f"{old[0]}x{old[1]} to {new[0]}x{new[1]} patches; set model.resize=bicubic"
        )
    places = [_geometric_places(before, after) for before, after in zip(old, new, strict=True)]
    wanted = [np.arange(1.0 - side, side) for side in new]
    # FITPACK's interpolating spline, which interp2d(kind="cubic") was on such a grid too
    sized = [
        RectBivariateSpline(*places, map_yx, s=0)(*wanted) for map_yx in maps_Kyx.cpu().numpy()
    ]
    return torch.from_numpy(np.stack(sized)).float().to(maps_Kyx.device)


def _geometric_places(old: int, new: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Where the offsets -(old - 1) .. old - 1 of one axis go: 0, 1, 1 + q, 1 + q + q^2, ...

    q is found by BEiT's bisection in [1.01, 1.5], so that the last one is the new edge.
    """
    if old == new:
        return np.arange(1.0 - old, old)
    steps, low, high = old - 1, 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        if (1 - ratio**steps) / (1 - ratio) > new - 1:
            high = ratio
        else:
            low = ratio
    distances = np.cumsum(ratio ** np.arange(steps))
    return np.concatenate([-distances[::-1], [0.0], distances])
