"""How others name the weights of an encoder: tables, read both ways.

Names are ours -> theirs, without what stands before the patch embedding ("backbone.", "vit."). The
tables of one kind of block, of the tokens and of the stem are put together in `SCHEMES`; the first
scheme that fits best is taken, so those with more to recognise them by stand first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Table = Mapping[str, str]
Pixels = tuple[float, float, float]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

# The convolution of a linear stem; `import_weights` finds what stands before it by this name.
STEM_WEIGHTS = (
    "patch_embed.proj.weight",
    "patch_embed.proj.0.weight",
    "embeddings.patch_embeddings.projection.weight",
)

_LINEAR = {"stem.project.{}": "patch_embed.proj.{}"}
# deit's hMLP_stem is one Sequential; activations, which have no weights, take numbers 2 and 5.
_HMLP = {f"stem.layers.{n}.{{}}": f"patch_embed.proj.{n}.{{}}" for n in (0, 1, 3, 4, 6, 7)}
_TOKENS = {
    "encoder.cls_token": "cls_token",
    "encoder.pos_embed": "pos_embed",
    "encoder.norm.{}": "norm.{}",
}
_BLOCK = {
    "encoder.blocks.{}.attns.0.norm.{}": "blocks.{}.norm1.{}",
    "encoder.blocks.{}.attns.0.attn.{}": "blocks.{}.attn.{}",
    "encoder.blocks.{}.ffns.0.norm.{}": "blocks.{}.norm2.{}",
    "encoder.blocks.{}.ffns.0.mlp.{}": "blocks.{}.mlp.{}",
}
_TIMM_SCALES = {
    "encoder.blocks.{}.attns.0.ls.{}": "blocks.{}.ls1.{}",
    "encoder.blocks.{}.ffns.0.ls.{}": "blocks.{}.ls2.{}",
}
_GAMMAS = {
    "encoder.blocks.{}.attns.0.ls.gamma": "blocks.{}.gamma_1",
    "encoder.blocks.{}.ffns.0.ls.gamma": "blocks.{}.gamma_2",
}
_SECOND_BRANCH = {
    "encoder.blocks.{}.attns.1.norm.{}": "blocks.{}.norm11.{}",
    "encoder.blocks.{}.attns.1.attn.{}": "blocks.{}.attn1.{}",
    "encoder.blocks.{}.attns.1.ls.gamma": "blocks.{}.gamma_1_1",
    "encoder.blocks.{}.ffns.1.norm.{}": "blocks.{}.norm21.{}",
    "encoder.blocks.{}.ffns.1.mlp.{}": "blocks.{}.mlp1.{}",
    "encoder.blocks.{}.ffns.1.ls.gamma": "blocks.{}.gamma_2_1",
}
_TIMM_PARALLEL = {
    "encoder.blocks.{}.attns.{}": "blocks.{}.attns.{}",
    "encoder.blocks.{}.ffns.{}": "blocks.{}.ffns.{}",
}
_BEIT_POSITIONS: Mapping[str, Table] = {
    "relative": {"encoder.relative.{}.table": "blocks.{}.attn.relative_position_bias_table"},
    "relative_shared": {"encoder.relative.0.table": "rel_pos_bias.relative_position_bias_table"},
}

# transformers: names in files on the Hub; within a model they have changed between versions.
_HF_TOKENS = {
    "stem.project.{}": "embeddings.patch_embeddings.projection.{}",
    "encoder.cls_token": "embeddings.cls_token",
    "encoder.pos_embed": "embeddings.position_embeddings",
    "encoder.norm.{}": "layernorm.{}",
}
_LAYER = "encoder.layer.{}"
_ATTENTION = f"{_LAYER}.attention.attention"
_HF_ATTENTION = {
    "encoder.blocks.{}.attns.0.attn.query.{}": f"{_ATTENTION}.query.{{}}",
    "encoder.blocks.{}.attns.0.attn.key.{}": f"{_ATTENTION}.key.{{}}",
    "encoder.blocks.{}.attns.0.attn.value.{}": f"{_ATTENTION}.value.{{}}",
    "encoder.blocks.{}.attns.0.attn.proj.{}": f"{_LAYER}.attention.output.dense.{{}}",
}
_HF_BLOCK = {
    **_HF_ATTENTION,
    "encoder.blocks.{}.attns.0.norm.{}": f"{_LAYER}.layernorm_before.{{}}",
    "encoder.blocks.{}.ffns.0.norm.{}": f"{_LAYER}.layernorm_after.{{}}",
    "encoder.blocks.{}.ffns.0.mlp.fc1.{}": f"{_LAYER}.intermediate.dense.{{}}",
    "encoder.blocks.{}.ffns.0.mlp.fc2.{}": f"{_LAYER}.output.dense.{{}}",
}
_HF_SCALES = {
    "encoder.blocks.{}.attns.0.ls.gamma": f"{_LAYER}.lambda_1",
    "encoder.blocks.{}.ffns.0.ls.gamma": f"{_LAYER}.lambda_2",
}
_HF_DINOV2_BLOCK = {
    **_HF_ATTENTION,
    "encoder.blocks.{}.attns.0.norm.{}": f"{_LAYER}.norm1.{{}}",
    "encoder.blocks.{}.attns.0.ls.gamma": f"{_LAYER}.layer_scale1.lambda1",
    "encoder.blocks.{}.ffns.0.norm.{}": f"{_LAYER}.norm2.{{}}",
    "encoder.blocks.{}.ffns.0.mlp.{}": f"{_LAYER}.mlp.{{}}",
    "encoder.blocks.{}.ffns.0.ls.gamma": f"{_LAYER}.layer_scale2.lambda1",
}
_HF_TABLE = "relative_position_bias.relative_position_bias_table"
_HF_POSITIONS: Mapping[str, Table] = {
    "relative": {"encoder.relative.{}.table": f"{_ATTENTION}.{_HF_TABLE}"},
    "relative_shared": {"encoder.relative.0.table": f"encoder.{_HF_TABLE}"},
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
    "layers.{}.mlp.fc1.{}": f"{_LAYER}.intermediate.dense.{{}}",
    "layers.{}.mlp.fc2.{}": f"{_LAYER}.output.dense.{{}}",
    "layers.{}.relative_position_bias.{}": f"{_ATTENTION}.relative_position_bias.{{}}",
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
        {**_HMLP, **_LINEAR, **_TOKENS, **_BLOCK, **_GAMMAS, **_SECOND_BRANCH},
        signs=("blocks.{}.attn1.{}", "blocks.{}.mlp1.{}"),
    ),
    "timm_parallel": Scheme(
        "timm's VisionTransformer of ParallelThingsBlocks",
        {**_LINEAR, **_TOKENS, **_TIMM_PARALLEL},
        signs=("blocks.{}.attns.{}",),
    ),
    "beit": Scheme(
        "unilm's BEiT and BEiT v2, and timm's Beit",
        {**_LINEAR, **_TOKENS, **_BLOCK, **_GAMMAS},
        signs=("blocks.{}.attn.q_bias",),
        positions=_BEIT_POSITIONS,
        pixels=HALF,
        note="BEiT's ImageNet-1k and v2 weights take ImageNet's mean and std",
    ),
    "deit3": Scheme(
        "deit's DeiT-III",
        {**_HMLP, **_LINEAR, **_TOKENS, **_BLOCK, **_GAMMAS},
        signs=("blocks.{}.gamma_1", "blocks.{}.attn.qkv.bias"),
    ),
    "mae": Scheme(
        "MAE's pretraining, with its decoder",
        {**_LINEAR, **_TOKENS, **_BLOCK},
        signs=("decoder_embed.{}", "blocks.{}.attn.qkv.{}"),
    ),
    "dinov2": Scheme(
        "DINOv2, and timm's ViT with LayerScale (its DeiT-III)",
        {**_LINEAR, **_TOKENS, **_BLOCK, **_TIMM_SCALES},
        signs=("blocks.{}.ls1.{}",),
    ),
    "timm": Scheme(
        "timm's VisionTransformer, also DeiT and MAE's encoder",
        {**_HMLP, **_LINEAR, **_TOKENS, **_BLOCK, **_TIMM_SCALES},
        signs=("blocks.{}.norm1.{}",),
        note="some of timm's weights (augreg) take mean and std 0.5",
    ),
    "hf_dinov2": Scheme(
        "transformers' Dinov2Model",
        {**_HF_TOKENS, **_HF_DINOV2_BLOCK},
        signs=("encoder.layer.{}.layer_scale1.lambda1",),
        aliases=_HF_ATTENTION_IN_MODEL,
    ),
    "hf_vit": Scheme(
        "transformers' ViTModel, and ViTMAEModel",
        {**_HF_TOKENS, **_HF_BLOCK},
        signs=("encoder.layer.{}.attention.attention.key.bias",),
        aliases=_HF_IN_MODEL,
        pixels=HALF,
        note=f"{_HF_EPS}; ViTMAE's weights take ImageNet's mean and std",
    ),
    "hf_beit": Scheme(
        "transformers' BeitModel",
        {**_HF_TOKENS, **_HF_BLOCK, **_HF_SCALES},
        signs=("encoder.layer.{}.layernorm_before.{}",),
        positions=_HF_POSITIONS,
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
