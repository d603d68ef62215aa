"""Names of weights in other libraries: tables, and a move in which nothing is left over."""

import re
from collections.abc import Mapping

from torch import Tensor

# Ours -> timm's VisionTransformer; each {} stands for one or more parts of a name. A whole table is
# a stem's, the tokens' and that of one kind of block; it is read both ways.
TIMM_STEM = {"stem.{}": "patch_embed.stem.{}"}  # our stem as embed_layer
TIMM_LINEAR = {"stem.project.{}": "patch_embed.proj.{}"}  # timm's PatchEmbed
TIMM_TOKENS = {
    "encoder.cls_token": "cls_token",
    "encoder.pos_embed": "pos_embed",
    "encoder.norm.{}": "norm.{}",
}
TIMM_BLOCK = {
    "encoder.blocks.{}.attns.0.norm.{}": "blocks.{}.norm1.{}",
    "encoder.blocks.{}.attns.0.attn.{}": "blocks.{}.attn.{}",
    "encoder.blocks.{}.attns.0.ls.{}": "blocks.{}.ls1.{}",
    "encoder.blocks.{}.ffns.0.norm.{}": "blocks.{}.norm2.{}",
    "encoder.blocks.{}.ffns.0.mlp.{}": "blocks.{}.mlp.{}",
    "encoder.blocks.{}.ffns.0.ls.{}": "blocks.{}.ls2.{}",
}
TIMM_PARALLEL_BLOCK = {
    "encoder.blocks.{}.attns.{}": "blocks.{}.attns.{}",
    "encoder.blocks.{}.ffns.{}": "blocks.{}.ffns.{}",
}


def rename(weights: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights under the table's new names; ValueError lists names that no or two patterns fit."""
    moved: dict[str, Tensor] = {}
    for old, weight in weights.items():
        new = [name for pattern in table if (name := _renamed(old, pattern, table[pattern]))]
        if len(new) != 1 or new[0] in moved:
            raise ValueError(f"'{old}' becomes {new or 'nothing'}; mend the table of names")
        moved[new[0]] = weight
    return moved


def check_equal_names(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """ValueError listing what is left over on either side, and weights of another shape."""
    unused = sorted(set(weights) - set(expected))
    unfilled = sorted(set(expected) - set(weights))
    shapes = [n for n in weights if n in expected and weights[n].shape != expected[n].shape]
    if unused or unfilled or shapes:
        raise ValueError(
            f"weights do not fit: unused {unused}, unfilled {unfilled}, of another shape {shapes}"
        )


def _renamed(name: str, old: str, new: str) -> str | None:
    pattern = re.escape(old).replace(r"\{\}", "(.+)")
    found = re.fullmatch(pattern, name)
    return new.format(*found.groups()) if found else None
