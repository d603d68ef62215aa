"""What every parameter and buffer is for: its role, branch and depth; and whether it decays."""

import re
from typing import Literal, NamedTuple

from torch import Tensor

from mimkit.models.encoder import ImageEncoder
from mimkit.models.mim import MaskedImageModel

Kind = Literal["stem", "position", "attention", "mlp", "norm", "scale", "head", "token"]


class Role(NamedTuple):
    """Depth 0 is the stem and the embeddings, 1 to L the blocks, L + 1 what follows them."""

    kind: Kind
    branch: int
    depth: int


# The first pattern that matches a name decides. A shared relative bias counts as last, as in
# BEiT's layer-wise decay, which gives it and every unknown name the full learning rate.
_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"stem\..+", "stem"),
    (r"mask_token|encoder\.cls_token", "token"),
    (r"encoder\.pos_embed|encoder\.relative\..+", "position"),
    (r"encoder\.norm\..+|encoder\.blocks\.\d+\.\w+\.\d+\.norm\..+", "norm"),
    (r"encoder\.blocks\.\d+\.\w+\.\d+\.ls\..+", "scale"),
    (r"encoder\.blocks\.\d+\.attns\..+", "attention"),
    (r"encoder\.blocks\.\d+\.ffns\..+", "mlp"),
    (r"head\..+", "head"),
)
_IN_BLOCK = re.compile(r"encoder\.blocks\.(?P<block>\d+)\.\w+\.(?P<branch>\d+)\.")
_BIAS = re.compile(r"encoder\.relative\.(?P<block>\d+)\.")


def role_of(model: MaskedImageModel | ImageEncoder) -> dict[str, Role]:
    """Name -> role of every parameter and buffer; an error lists the names that have none."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    kinds = {name: _kind(name) for name in names}
    if missing := [name for name, kind in kinds.items() if kind is None]:
        raise ValueError(f"no role for {', '.join(missing)}; add a pattern to {__name__}")
    return {name: _role(name, kind, model) for name, kind in kinds.items() if kind is not None}


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies, as in BEiT: not to vectors, cls token and absolute positions.

    The mask token (3-D) and relative position tables do decay.
    """
    return parameter.ndim > 1 and not name.endswith(("cls_token", "pos_embed"))


def _kind(name: str) -> Kind | None:
    return next((kind for pattern, kind in _KINDS if re.fullmatch(pattern, name)), None)


def _role(name: str, kind: Kind, model: MaskedImageModel | ImageEncoder) -> Role:
    after = model.encoder.depth + 1
    if found := _IN_BLOCK.match(name):
        return Role(kind, int(found["branch"]), int(found["block"]) + 1)
    if found := _BIAS.match(name):
        shared = model.encoder.positions == "relative_shared"
        return Role(kind, 0, after if shared else int(found["block"]) + 1)
    at_end = kind in ("head", "norm")
    return Role(kind, 0, after if at_end else 0)
