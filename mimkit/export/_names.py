"""Names of weights in an export: tables of one target together, and a move that loses none."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mimkit.weight_names import BLOCK, GAMMAS, HF_BLOCK, HF_SCALES, TIMM_SCALES, new_names

TIMM_STEM = {"stem.{}": "patch_embed.stem.{}"}  # our stem as embed_layer
TIMM_BLOCK = {**BLOCK, **TIMM_SCALES}
TIMM_BEIT_BLOCK = {**BLOCK, **GAMMAS}
HF_LAYERS = {**HF_BLOCK, **HF_SCALES}
# BeitForMaskedImageModeling: the encoder under `beit.`, the final norm and the head beside it.
HF_HEAD = {
    "mask_token": "beit.embeddings.mask_token",
    "encoder.norm.{}": "layernorm.{}",
    "head.{}": "lm_head.{}",
}
# Classifiers: our norm stands behind pooling; of the class token alone it may stand before it.
TIMM_HEAD = {"head.{}": "head.{}"}
TIMM_POOLED = {"pool_norm.{}": "fc_norm.{}"}
TIMM_NORM = {"pool_norm.{}": "norm.{}"}
HF_CLASSIFIER = {"head.{}": "classifier.{}"}
HF_POOLED = {"pool_norm.{}": "pooler.layernorm.{}"}
HF_NORM = {"pool_norm.{}": "layernorm.{}"}


def rename(weights: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights under the table's new names; ValueError lists names that no or two patterns fit."""
    moved: dict[str, Tensor] = {}
    for old, weight in weights.items():
        new = new_names(old, table)
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


def with_full_bias(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """BEiT's separate query and value biases as one qkv bias whose key part is zero."""
    full = dict(weights)
    for name in weights:
        if name.endswith(".q_bias"):
            prefix = name.removesuffix("q_bias")
            q_bias, v_bias = full.pop(name), full.pop(f"{prefix}v_bias")
            full[f"{prefix}qkv.bias"] = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])
    return full


def without_key_bias(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A qkv bias as BEiT's two, without the keys'.

    That one adds the same to all scores of a query, which softmax does not see.
    """
    separate = dict(weights)
    for name in weights:
        if name.endswith(".attn.qkv.bias"):
            prefix = name.removesuffix("qkv.bias")
            q_bias, _, v_bias = separate.pop(name).chunk(3)
            separate |= {f"{prefix}q_bias": q_bias, f"{prefix}v_bias": v_bias}
    return separate


def split_qkv(weights: Mapping[str, Tensor], *, key_bias: bool) -> dict[str, Tensor]:
    """Queries, keys and values as three layers, of the weights of the encoder's blocks.

    Args:
        key_bias: whether the keys' layer has a bias (ViT) or none (BEiT).
    """
    whole = with_full_bias(weights)
    split: dict[str, Tensor] = {}
    for name, weight in whole.items():
        prefix, found, kind = name.partition(".attn.qkv.")
        if not (found and prefix.startswith("encoder.blocks.")):
            split[name] = weight
            continue
        for part, value in zip(("query", "key", "value"), weight.chunk(3), strict=True):
            if key_bias or (part, kind) != ("key", "bias"):
                split[f"{prefix}.attn.{part}.{kind}"] = value
    return split
