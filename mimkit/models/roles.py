"""What every parameter and buffer is for: its role, branch and depth; and whether it decays."""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from mimkit.errors import UserError
from mimkit.models.classifier import ImageClassifier
from mimkit.models.encoder import ImageEncoder
from mimkit.models.mim import MaskedImageModel

Kind = Literal["stem", "position", "attention", "ffn", "norm", "scale", "head", "token"]


class Role(NamedTuple):
    """Depth 0 is the stem and the embeddings, 1 to L the blocks, L + 1 what follows them."""

    kind: Kind
    branch: int
    depth: int


# The first pattern that matches a name decides. A shared relative bias is an embedding and has
# depth 0: every block reads it, the first one too. BEiT's layer-wise decay gives it, like every
# name that it does not know, the full learning rate of the head.
_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"stem\..+", "stem"),
    (r"mask_token|encoder\.cls_token", "token"),
    (r"encoder\.pos_embed|encoder\.relative\..+", "position"),
    (r"encoder\.norm\..+|encoder\.blocks\.\d+\.\w+\.\d+\.norm\..+", "norm"),
    (r"encoder\.blocks\.\d+\.\w+\.\d+\.ls\..+", "scale"),
    (r"encoder\.blocks\.\d+\.attns\..+", "attention"),
    (r"encoder\.blocks\.\d+\.ffns\..+", "ffn"),
    (r"head\..+|pool_norm\..+", "head"),
)
_IN_BLOCK = re.compile(r"encoder\.blocks\.(?P<block>\d+)\.\w+\.(?P<branch>\d+)\.")
_BIAS = re.compile(r"encoder\.relative\.(?P<block>\d+)\.")


Model = MaskedImageModel | ImageEncoder | ImageClassifier


def role_of(model: Model) -> dict[str, Role]:
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


def trained_names(model: Model, roles: Sequence[str], *, head: bool = True) -> set[str]:
    """Names of the parameters that train.

    Args:
        roles: "all", or what things are for: "attention" (queries, keys, values and projection of
            every branch), "ffn", "norm", "scale" (LayerScale), "stem", "position", "token", "head";
            or "bias", every bias of whatever part, those of norms too.
        head: the head and its norm too, whatever `roles` says.

    Raises:
        UserError: a role that matches nothing in this model.
    """
    of_name = role_of(model)
    names = [name for name, _ in model.named_parameters()]
    chosen = {role: {name for name in names if _fits(name, of_name[name].kind, role)}
              for role in (*roles, *(["head"] if head else []))}  # fmt: skip
    if empty := [role for role, found in chosen.items() if not found]:
        present = sorted({of_name[name].kind for name in names})
        raise UserError(
            f"train.roles={', '.join(roles)}: this model has no parameter of the role "
            f"{', '.join(empty)}; it has {', '.join(present)}, and bias"
        )
    return set().union(*chosen.values())


def learning_rate_scales(model: Model, *, decay: float) -> dict[str, float]:
    """Parameter -> factor of its learning rate: decay^(L + 1 - depth) (BEiT, layer-wise decay).

    1 for head and last norm, decay for the last block, decay^(L + 1) for stem, tokens, positions.
    """
    last, of_name = model.encoder.depth + 1, role_of(model)
    return {name: decay ** (last - of_name[name].depth) for name, _ in model.named_parameters()}


def _fits(name: str, kind: Kind, role: str) -> bool:
    if role == "bias":
        return name.endswith("bias") and kind != "head"
    return role in ("all", kind)


def _role(name: str, kind: Kind, model: Model) -> Role:
    after = model.encoder.depth + 1
    if found := _IN_BLOCK.match(name):
        return Role(kind, int(found["branch"]), int(found["block"]) + 1)
    if found := _BIAS.match(name):
        shared = model.encoder.positions == "relative_shared"
        return Role(kind, 0, 0 if shared else int(found["block"]) + 1)
    at_end = kind in ("head", "norm")
    return Role(kind, 0, after if at_end else 0)
