"""Whose weights are recognised, by which of the tables in `mimkit.weight_names`.

The tables of one kind of block, of the tokens and of the stem are put together in `SCHEMES`; the
first scheme that fits best is taken, so those with more to recognise them by stand first. Tables
that only an import needs stand here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mimkit.weight_names import (
    BEIT_POSITIONS,
    BLOCK,
    GAMMAS,
    HF_ATTENTION,
    HF_BLOCK,
    HF_LAYER,
    HF_POSITIONS,
    HF_SCALES,
    HF_TOKENS,
    LINEAR,
    TIMM_PARALLEL,
    TIMM_SCALES,
    TOKENS,
    Table,
)

Pixels = tuple[float, float, float]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

# The convolution of a linear stem; `import_weights` finds what stands before it by this name.
STEM_WEIGHTS = (
    "patch_embed.proj.weight",
    "patch_embed.proj.0.weight",
    "embeddings.patch_embeddings.projection.weight",
)

# deit's hMLP_stem is one Sequential; activations, which have no weights, take numbers 2 and 5.
_HMLP = {f"stem.layers.{n}.{{}}": f"patch_embed.proj.{n}.{{}}" for n in (0, 1, 3, 4, 6, 7)}
_SECOND_BRANCH = {
    "encoder.blocks.{}.attns.1.norm.{}": "blocks.{}.norm11.{}",
    "encoder.blocks.{}.attns.1.attn.{}": "blocks.{}.attn1.{}",
    "encoder.blocks.{}.attns.1.ls.gamma": "blocks.{}.gamma_1_1",
    "encoder.blocks.{}.ffns.1.norm.{}": "blocks.{}.norm21.{}",
    "encoder.blocks.{}.ffns.1.mlp.{}": "blocks.{}.mlp1.{}",
    "encoder.blocks.{}.ffns.1.ls.gamma": "blocks.{}.gamma_2_1",
}
_HF_DINOV2_BLOCK = {
    **HF_ATTENTION,
    "encoder.blocks.{}.attns.0.norm.{}": f"{HF_LAYER}.norm1.{{}}",
    "encoder.blocks.{}.attns.0.ls.gamma": f"{HF_LAYER}.layer_scale1.lambda1",
    "encoder.blocks.{}.ffns.0.norm.{}": f"{HF_LAYER}.norm2.{{}}",
    "encoder.blocks.{}.ffns.0.mlp.{}": f"{HF_LAYER}.mlp.{{}}",
    "encoder.blocks.{}.ffns.0.ls.gamma": f"{HF_LAYER}.layer_scale2.lambda1",
}
# Names within a model of transformers 5 -> those of its files. The last pattern takes what is left.
_HF_ATTENTION_IN_MODEL = {
    "{}.attention.q_proj.{}": "{}.attention.attention.query.{}",
    "{}.attention.k_proj.{}": "{}.attention.attention.key.{}",
    "{}.attention.v_proj.{}": "{}.attention.attention.value.{}",
    "{}.attention.o_proj.{}": "{}.attention.output.dense.{}",
}
_HF_IN_MODEL = {
    **{f"layers.{old}": f"encoder.layer.{new}" for old, new in _HF_ATTENTION_IN_MODEL.items()},
    "layers.{}.mlp.fc1.{}": f"{HF_LAYER}.intermediate.dense.{{}}",
    "layers.{}.mlp.fc2.{}": f"{HF_LAYER}.output.dense.{{}}",
    "layers.{}.relative_position_bias.{}": (
        f"{HF_LAYER}.attention.attention.relative_position_bias.{{}}"
    ),
    "shared_position_bias.{}": "encoder.relative_position_bias.{}",
    "layers.{}": "encoder.layer.{}",
}

# Measured on small random models: tokens differ by 2e-5 to 4e-4.
_HF_EPS = (
    "transformers' LayerNorms have eps 1e-12 by default, mimkit's 1e-6 (as unilm, timm and MAE): "
    "tokens differ by some 1e-4 where layer_norm_eps in its config.json is not 1e-6"
)


@dataclass(frozen=True)
class Scheme:
    """One way of naming an encoder's weights.

    Attributes:
        what: whose it is, for a person.
        table: ours -> theirs.
        signs: patterns of which each must fit some name of a file in this scheme.
        positions: ours -> theirs of relative biases, by the encoder's kind of positions.
        aliases: theirs -> theirs as in `table`, for names that changed.
        pixels: mean and std that its published weights were trained on.
        note: what a person should know besides.
    """

    what: str
    table: Table
    signs: tuple[str, ...]
    positions: Mapping[str, Table] = field(default_factory=dict)
    aliases: Table = field(default_factory=dict)
    pixels: tuple[Pixels, Pixels] = IMAGENET
    note: str = ""

    @property
    def whole_table(self) -> dict[str, str]:
        """Ours -> theirs, with every kind of positions."""
        biases = [pair for table in self.positions.values() for pair in table.items()]
        return {**dict(biases), **self.table}


SCHEMES: Mapping[str, Scheme] = {
    "3things": Scheme(
        "deit's parallel blocks, Layer_scale_init_Block_paralx2 and Block_paralx2",
        {**_HMLP, **LINEAR, **TOKENS, **BLOCK, **GAMMAS, **_SECOND_BRANCH},
        signs=("blocks.{}.attn1.{}", "blocks.{}.mlp1.{}"),
    ),
    "timm_parallel": Scheme(
        "timm's VisionTransformer of ParallelThingsBlocks",
        {**LINEAR, **TOKENS, **TIMM_PARALLEL},
        signs=("blocks.{}.attns.{}",),
    ),
    "beit": Scheme(
        "unilm's BEiT and BEiT v2, and timm's Beit",
        {**LINEAR, **TOKENS, **BLOCK, **GAMMAS},
        signs=("blocks.{}.attn.q_bias",),
        positions=BEIT_POSITIONS,
        pixels=HALF,
        note="BEiT's ImageNet-1k and v2 weights take ImageNet's mean and std",
    ),
    "deit3": Scheme(
        "deit's DeiT-III",
        {**_HMLP, **LINEAR, **TOKENS, **BLOCK, **GAMMAS},
        signs=("blocks.{}.gamma_1", "blocks.{}.attn.qkv.bias"),
    ),
    "mae": Scheme(
        "MAE's pretraining, with its decoder",
        {**LINEAR, **TOKENS, **BLOCK},
        signs=("decoder_embed.{}", "blocks.{}.attn.qkv.{}"),
    ),
    "dinov2": Scheme(
        "DINOv2, and timm's ViT with LayerScale (its DeiT-III)",
        {**LINEAR, **TOKENS, **BLOCK, **TIMM_SCALES},
        signs=("blocks.{}.ls1.{}",),
    ),
    "timm": Scheme(
        "timm's VisionTransformer, also DeiT and MAE's encoder",
        {**_HMLP, **LINEAR, **TOKENS, **BLOCK, **TIMM_SCALES},
        signs=("blocks.{}.norm1.{}",),
        note="some of timm's weights (augreg) take mean and std 0.5",
    ),
    "hf_dinov2": Scheme(
        "transformers' Dinov2Model",
        {**HF_TOKENS, **_HF_DINOV2_BLOCK},
        signs=("encoder.layer.{}.layer_scale1.lambda1",),
        aliases=_HF_ATTENTION_IN_MODEL,
    ),
    "hf_vit": Scheme(
        "transformers' ViTModel, and ViTMAEModel",
        {**HF_TOKENS, **HF_BLOCK},
        signs=("encoder.layer.{}.attention.attention.key.bias",),
        aliases=_HF_IN_MODEL,
        pixels=HALF,
        note=f"{_HF_EPS}; ViTMAE's weights take ImageNet's mean and std",
    ),
    "hf_beit": Scheme(
        "transformers' BeitModel",
        {**HF_TOKENS, **HF_BLOCK, **HF_SCALES},
        signs=("encoder.layer.{}.layernorm_before.{}",),
        positions=HF_POSITIONS,
        aliases=_HF_IN_MODEL,
        pixels=HALF,
        note=_HF_EPS,
    ),
}

# Theirs -> why it is no part of an encoder. Asked before any table, as are the refusals.
LEFT_OUT = {
    "{}relative_position_index": "computed from the grid",
    "decoder{}": "the decoder of pretraining",
    "{}mask_token": "for pretraining only",
    "mask_token": "for pretraining only",
    "lm_head.{}": "the head of pretraining",
    "cls_pt_{}": "BEiT v2's extra blocks of pretraining",
    "fc_norm.{}": "the norm of the head, behind pooling",
    "pooler.{}": "behind the encoder",
    "attn_pool.{}": "behind the encoder",
    "head{}": "the head",
    "classifier.{}": "the head",
    "dino_head.{}": "the head of pretraining",
    "ibot_head.{}": "the head of pretraining",
}

# Theirs -> what our encoder does not have.
REFUSED = {
    "{}register_tokens": "registers are further tokens; take the weights without them",
    "register_tokens": "registers are further tokens; take the weights without them",
    "reg_token": "registers are further tokens; take the weights without them",
    "dist_token": "a distillation token is a second class token; take the weights without it",
    "{}distillation_token": "a distillation token is a second class token",
    "{}.mlp.w{}": "its MLPs are SwiGLU, ours GELU; take a smaller model of the family",
    "{}.mlp.fc1_g.{}": "its MLPs are SwiGLU, ours GELU",
    "{}.attn.q_norm.{}": "it normalises queries and keys",
    "{}.attn.k_norm.{}": "it normalises queries and keys",
    "{}.attn.norm.{}": "it has a norm within attention",
    "norm_pre.{}": "it has a norm in front of the blocks",
}
