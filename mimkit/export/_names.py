"""Names of weights in other libraries: tables, and a move in which nothing is left over."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

# Ours -> theirs; each {} stands for one or more parts of a name. A whole table is a stem's, the
# tokens', the positions' and that of one kind of block; it is read both ways (`reversed_table`).

# timm's VisionTransformer and Beit
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
TIMM_BEIT_BLOCK = {
    "encoder.blocks.{}.attns.0.norm.{}": "blocks.{}.norm1.{}",
    "encoder.blocks.{}.attns.0.attn.{}": "blocks.{}.attn.{}",
    "encoder.blocks.{}.attns.0.ls.gamma": "blocks.{}.gamma_1",
    "encoder.blocks.{}.ffns.0.norm.{}": "blocks.{}.norm2.{}",
    "encoder.blocks.{}.ffns.0.mlp.{}": "blocks.{}.mlp.{}",
    "encoder.blocks.{}.ffns.0.ls.gamma": "blocks.{}.gamma_2",
}
TIMM_POSITIONS = {
    "relative": {"encoder.relative.{}.table": "blocks.{}.attn.relative_position_bias_table"},
    "relative_shared": {"encoder.relative.0.table": "rel_pos_bias.relative_position_bias_table"},
}

# transformers' BeitModel and ViTModel, by the names of files on the Hub. Every version reads those;
# within a model the names have changed between versions.
HF_TOKENS = {
    "stem.project.{}": "embeddings.patch_embeddings.projection.{}",
    "encoder.cls_token": "embeddings.cls_token",
    "encoder.pos_embed": "embeddings.position_embeddings",
    "encoder.norm.{}": "layernorm.{}",
}
_HF_LAYER = "encoder.layer.{}"
_HF_ATTENTION = f"{_HF_LAYER}.attention.attention"
HF_BLOCK = {
    "encoder.blocks.{}.attns.0.norm.{}": f"{_HF_LAYER}.layernorm_before.{{}}",
    "encoder.blocks.{}.attns.0.attn.query.{}": f"{_HF_ATTENTION}.query.{{}}",
    "encoder.blocks.{}.attns.0.attn.key.{}": f"{_HF_ATTENTION}.key.{{}}",
    "encoder.blocks.{}.attns.0.attn.value.{}": f"{_HF_ATTENTION}.value.{{}}",
    "encoder.blocks.{}.attns.0.attn.proj.{}": f"{_HF_LAYER}.attention.output.dense.{{}}",
    "encoder.blocks.{}.attns.0.ls.gamma": f"{_HF_LAYER}.lambda_1",
    "encoder.blocks.{}.ffns.0.norm.{}": f"{_HF_LAYER}.layernorm_after.{{}}",
    "encoder.blocks.{}.ffns.0.mlp.fc1.{}": f"{_HF_LAYER}.intermediate.dense.{{}}",
    "encoder.blocks.{}.ffns.0.mlp.fc2.{}": f"{_HF_LAYER}.output.dense.{{}}",
    "encoder.blocks.{}.ffns.0.ls.gamma": f"{_HF_LAYER}.lambda_2",
}
_HF_TABLE = "relative_position_bias.relative_position_bias_table"
HF_POSITIONS = {
    "relative": {"encoder.relative.{}.table": f"{_HF_ATTENTION}.{_HF_TABLE}"},
    "relative_shared": {"encoder.relative.0.table": f"encoder.{_HF_TABLE}"},
}
# BeitForMaskedImageModeling: the encoder under `beit.`, the final norm and the head beside it.
HF_HEAD = {
    "mask_token": "beit.embeddings.mask_token",
    "encoder.norm.{}": "layernorm.{}",
    "head.{}": "lm_head.{}",
}


def reversed_table(table: Mapping[str, str]) -> dict[str, str]:
    """Theirs -> ours."""
    return {theirs: ours for ours, theirs in table.items()}


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


def _renamed(name: str, old: str, new: str) -> str | None:
    pattern = re.escape(old).replace(r"\{\}", "(.+)")
    found = re.fullmatch(pattern, name)
    return new.format(*found.groups()) if found else None
