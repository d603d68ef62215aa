"""What training moved, by role: the proof that what was frozen is what it was, bit for bit."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mimkit.models.roles import Role


class Moved(NamedTuple):
    """Of the parameters and buffers of one role.

    Attributes:
        numbers: how many there are, moved or not.
        moved: how many are in a tensor of which at least one bit is another.
        distance: Euclidean, relative to where they were (inf where all were 0 and moved).
    """

    numbers: int
    moved: int
    distance: float


def moved_by_role(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], roles: Mapping[str, Role]
) -> dict[str, Moved]:
    """Kind of role -> what became of it, in the order of the names.

    Args:
        roles: of `mimkit.models.roles.role_of`; names that only `before` has are left out.
    """
    kinds = dict.fromkeys(roles[name].kind for name in before if name in roles)
    return {
        kind: _moved(
            [(before[n], after[n]) for n in before if n in roles and roles[n].kind == kind]
        )
        for kind in kinds
    }


def unequal(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: Iterable[str]
) -> list[str]:
    """Those of `names` that are not the same bit for bit."""
    return [name for name in names if not torch.equal(before[name], after[name])]


def _moved(pairs: list[tuple[Tensor, Tensor]]) -> Moved:
    moved = sum(new.numel() for old, new in pairs if not torch.equal(old, new))
    squares = sum(float((new.double() - old.double()).square().sum()) for old, new in pairs)
    size = sum(float(old.double().square().sum()) for old, _ in pairs)
    distance = 0.0 if not squares else (squares / size) ** 0.5 if size else float("inf")
    return Moved(sum(old.numel() for old, _ in pairs), moved, distance)
