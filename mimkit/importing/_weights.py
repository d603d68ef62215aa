"""Theirs under our names, in the shapes of our encoder: biases joined, positions completed."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mimkit.batch import Grid
from mimkit.errors import UserError

_POSITIONS = "encoder.pos_embed"
_PARTS = ("query", "key", "value")


def joined_qkv(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values of three layers as one; without a keys' bias as BEiT's two."""
    joined = dict(weights)
    for name in weights:
        if not name.endswith(".attn.query.weight"):
            continue
        prefix = name.removesuffix("query.weight")
        parts = [f"{prefix}{part}.weight" for part in _PARTS]
        if not all(part in joined for part in parts):
            continue  # stays in the report as it is
        joined[f"{prefix}qkv.weight"] = torch.cat([joined.pop(part) for part in parts])
        for part, ours in zip(_PARTS, ("q_bias", "k_bias", "v_bias"), strict=True):
            if (bias := joined.pop(f"{prefix}{part}.bias", None)) is not None:
                joined[f"{prefix}{ours}"] = bias
    return joined


def with_one_bias(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every attention's bias of one kind, "qkv" if any needs it: then whole, else BEiT's two.

    Keys' biases of BEiT's layout are zero and are dropped; others make it a whole bias, which gives
    the same numbers. Where there is no bias in any block, BEiT's two are zeros.
    """
    prefixes = [n.removesuffix("qkv.weight") for n in weights if n.endswith(".attn.qkv.weight")]
    no_keys = torch.zeros(1)
    whole = any(
        f"{prefix}qkv.bias" in weights or bool(weights.get(f"{prefix}k_bias", no_keys).any())
        for prefix in prefixes
    )
    biased = whole or any(name.endswith((".q_bias", ".v_bias")) for name in weights)
    moved = dict(weights)
    for prefix in prefixes:
        k_bias = moved.pop(f"{prefix}k_bias", None)
        q_name, v_name = f"{prefix}q_bias", f"{prefix}v_bias"
        zeros = torch.zeros(len(weights[f"{prefix}qkv.weight"]) // 3)
        if not biased:
            moved |= {q_name: zeros, v_name: zeros}
        elif whole and {q_name, v_name} <= set(moved):
            biases = [moved.pop(q_name), zeros if k_bias is None else k_bias, moved.pop(v_name)]
            moved[f"{prefix}qkv.bias"] = torch.cat(biases)
    return moved


def with_class_slot(weights: Mapping[str, Tensor], grid: Grid) -> dict[str, Tensor]:
    """Positions with one for the class token: of zeros, where theirs are added before it joins."""
    moved = dict(weights)
    positions_1ND = weights.get(_POSITIONS)
    if positions_1ND is None:
        return moved
    patches = grid[0] * grid[1]
    if positions_1ND.shape[1] == patches:
        zeros_11D = torch.zeros_like(positions_1ND[:, :1])
        moved[_POSITIONS] = torch.cat([zeros_11D, positions_1ND], 1)
    elif positions_1ND.shape[1] != patches + 1:
        raise UserError(
            f"the file has {positions_1ND.shape[1]} position embeddings, but a grid of "
            f"{grid[0]}x{grid[1]} patches needs {patches}, or {patches + 1} with the class token's;"
            " give the size of images they were trained on: --image-size HxW"
        )
    return moved
