"""How others name the weights of an encoder: tables that export and import read, one each way.

Ours -> theirs, without what stands before the patch embedding ("backbone.", "vit."); each {} stands
for one or more parts of a name. A whole table is a stem's, the tokens', the positions' and that of
one kind of block.
"""

import re
from collections.abc import Iterable, Mapping

Table = Mapping[str, str]

# timm, and the repositories whose names it took: BEiT, MAE, DeiT, DINOv2
LINEAR = {"stem.project.{}": "patch_embed.proj.{}"}
TOKENS = {
    "encoder.cls_token": "cls_token",
    "encoder.pos_embed": "pos_embed",
    "encoder.norm.{}": "norm.{}",
}
BLOCK = {
    "encoder.blocks.{}.attns.0.norm.{}": "blocks.{}.norm1.{}",
    "encoder.blocks.{}.attns.0.attn.{}": "blocks.{}.attn.{}",
    "encoder.blocks.{}.ffns.0.norm.{}": "blocks.{}.norm2.{}",
    "encoder.blocks.{}.ffns.0.mlp.{}": "blocks.{}.mlp.{}",
}
TIMM_SCALES = {
    "encoder.blocks.{}.attns.0.ls.{}": "blocks.{}.ls1.{}",
    "encoder.blocks.{}.ffns.0.ls.{}": "blocks.{}.ls2.{}",
}
GAMMAS = {
    "encoder.blocks.{}.attns.0.ls.gamma": "blocks.{}.gamma_1",
    "encoder.blocks.{}.ffns.0.ls.gamma": "blocks.{}.gamma_2",
}
TIMM_PARALLEL = {
    "encoder.blocks.{}.attns.{}": "blocks.{}.attns.{}",
    "encoder.blocks.{}.ffns.{}": "blocks.{}.ffns.{}",
}
BEIT_POSITIONS: Mapping[str, Table] = {
    "relative": {"encoder.relative.{}.table": "blocks.{}.attn.relative_position_bias_table"},
    "relative_shared": {"encoder.relative.0.table": "rel_pos_bias.relative_position_bias_table"},
}

# transformers, by the names of files on the Hub. Every version reads those; within a model the
# names have changed between versions.
HF_TOKENS = {
    "stem.project.{}": "embeddings.patch_embeddings.projection.{}",
    "encoder.cls_token": "embeddings.cls_token",
    "encoder.pos_embed": "embeddings.position_embeddings",
    "encoder.norm.{}": "layernorm.{}",
}
HF_LAYER = "encoder.layer.{}"
_ATTENTION = f"{HF_LAYER}.attention.attention"
HF_ATTENTION = {
    "encoder.blocks.{}.attns.0.attn.query.{}": f"{_ATTENTION}.query.{{}}",
    "encoder.blocks.{}.attns.0.attn.key.{}": f"{_ATTENTION}.key.{{}}",
    "encoder.blocks.{}.attns.0.attn.value.{}": f"{_ATTENTION}.value.{{}}",
    "encoder.blocks.{}.attns.0.attn.proj.{}": f"{HF_LAYER}.attention.output.dense.{{}}",
}
HF_BLOCK = {
    **HF_ATTENTION,
    "encoder.blocks.{}.attns.0.norm.{}": f"{HF_LAYER}.layernorm_before.{{}}",
    "encoder.blocks.{}.ffns.0.norm.{}": f"{HF_LAYER}.layernorm_after.{{}}",
    "encoder.blocks.{}.ffns.0.mlp.fc1.{}": f"{HF_LAYER}.intermediate.dense.{{}}",
    "encoder.blocks.{}.ffns.0.mlp.fc2.{}": f"{HF_LAYER}.output.dense.{{}}",
}
HF_SCALES = {
    "encoder.blocks.{}.attns.0.ls.gamma": f"{HF_LAYER}.lambda_1",
    "encoder.blocks.{}.ffns.0.ls.gamma": f"{HF_LAYER}.lambda_2",
}
_TABLE = "relative_position_bias.relative_position_bias_table"
HF_POSITIONS: Mapping[str, Table] = {
    "relative": {"encoder.relative.{}.table": f"{_ATTENTION}.{_TABLE}"},
    "relative_shared": {"encoder.relative.0.table": f"encoder.{_TABLE}"},
}


def reversed_table(table: Table) -> dict[str, str]:
    """Theirs -> ours."""
    return {theirs: ours for ours, theirs in table.items()}


def new_names(name: str, table: Table) -> list[str]:
    """What every pattern that fits makes of the name, in the table's order."""
    return [new.format(*found.groups()) for old, new in table.items()
            if (found := _match(name, old))]  # fmt: skip


def fitting(name: str, patterns: Iterable[str]) -> str | None:
    """The first of the patterns that fits the name."""
    return next((pattern for pattern in patterns if _match(name, pattern)), None)


def _match(name: str, pattern: str) -> re.Match[str] | None:
    return re.fullmatch(re.escape(pattern).replace(r"\{\}", "(.+)"), name)
