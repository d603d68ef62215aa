"""What timm's classes are built with for an encoder, by which names, and which cannot be it."""

import json
from typing import Any

from mimkit.errors import UserError
from mimkit.export._headed import EncoderWithClassifier, has_norm
from mimkit.export._names import (
    TIMM_BEIT_BLOCK,
    TIMM_BLOCK,
    TIMM_HEAD,
    TIMM_NORM,
    TIMM_POOLED,
    TIMM_STEM,
)
from mimkit.export._recipe import is_plain_linear
from mimkit.export._timm_stem import stem_module
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.weight_names import BEIT_POSITIONS, LINEAR, TIMM_PARALLEL, TOKENS

PARALLEL = "ParallelThingsBlock"


def vit_table(model: ImageEncoder) -> dict[str, str]:
    """Ours -> the names of timm's VisionTransformer for this stem, these blocks and the head."""
    stem = LINEAR if is_plain_linear(model.stem) else TIMM_STEM
    block = TIMM_BLOCK if model.encoder.branches == 1 else TIMM_PARALLEL
    return {**stem, **TOKENS, **block, **_head_table(model)}


def beit_table(model: ImageEncoder) -> dict[str, str]:
    positions = BEIT_POSITIONS[model.encoder.positions]
    return {**LINEAR, **TOKENS, **TIMM_BEIT_BLOCK, **positions, **_head_table(model)}


def _head_table(model: ImageEncoder) -> dict[str, str]:
    if not isinstance(model, EncoderWithClassifier):
        return {}
    return {**TIMM_HEAD, **(TIMM_NORM if model.normed_first else TIMM_POOLED)}


def check_beit(model: ImageEncoder) -> None:
    """UserError with every reason for which timm's Beit cannot be this encoder."""
    encoder, reasons = model.encoder, []
    if not is_plain_linear(model.stem):
        reasons.append(f"no place for the stem '{model.stem.name}', its own is a plain linear one")
    if encoder.branches > 1:
        reasons.append(f"no blocks of {encoder.branches} branches")
    if not (isinstance(model, EncoderWithClassifier) or has_norm(model)):
        reasons.append("always a norm after the last block")
    if not reasons:
        return
    stem = model.stem
    foldable = stem.name == "linear_bn" and not stem.settings["gelu"]
    folds = "add --fold, which makes the stem linear; or " if foldable else ""
    raise UserError(
        f"encoder.positions is {encoder.positions}, which of timm's classes only Beit has, and "
        f"that has {'; and '.join(reasons)}. To mend it: {folds}take --format safetensors, hf, "
        "onnx or pt2, which hold every encoder; or pretrain with encoder.positions=absolute"
    )


def vit_arguments(model: ImageEncoder) -> dict[str, Any]:
    return {
        **_arguments(model),
        "pos_embed": "learn" if model.encoder.positions == "absolute" else "none",
        "final_norm": isinstance(model, EncoderWithClassifier) or has_norm(model),
        "class_token": True,
    }


def beit_arguments(model: ImageEncoder) -> dict[str, Any]:
    return {
        **_arguments(model),
        "use_abs_pos_emb": False,
        "use_rel_pos_bias": model.encoder.positions == "relative",
        "use_shared_rel_pos_bias": model.encoder.positions == "relative_shared",
    }


def _arguments(model: ImageEncoder) -> dict[str, Any]:
    """What timm's two classes have in common."""
    encoder, patch = model.encoder, model.stem.patch_size
    scale = encoder.layer_scale
    return {
        "img_size": [side * patch for side in encoder.grid],
        "patch_size": patch,
        "embed_dim": encoder.width,
        "depth": encoder.depth,
        "num_heads": encoder.heads,
        # Only where it starts; timm takes 0 for "without".
        "init_values": None if scale is None else scale or 1e-5,
        "qkv_bias": True,
        **_head_arguments(model),
    }


def _head_arguments(model: ImageEncoder) -> dict[str, Any]:
    if not isinstance(model, EncoderWithClassifier):
        return {"global_pool": "token", "num_classes": 0}
    pool = "avg" if model.pooling == "mean" else "token"  # with "avg" the norm is behind it
    return {"global_pool": pool, "num_classes": model.num_classes}


def block_recipe(encoder: Encoder) -> dict[str, str]:
    if encoder.branches == 1:
        return {}
    block = {"name": PARALLEL, "num_parallel": encoder.branches}
    return {"block": json.dumps(block)}


def usage_of_vit(encoder: ImageEncoder, imports: list[str]) -> list[str]:
    """Lines that make the model; what they import is added."""
    made, more = [], ""
    if not is_plain_linear(encoder.stem):
        module = stem_module(encoder.stem)
        imports.append(f"import {module}  # the file beside the weights")
        made.append(f'embed = {module}.embed_layer(json.loads(said["stem"])["settings"])')
        more += ", embed_layer=embed"
    if encoder.encoder.branches > 1:
        imports.insert(1, "from functools import partial")
        imports.append("from timm.models.vision_transformer import ParallelThingsBlock")
        made.append(
            f"block = partial(ParallelThingsBlock, num_parallel={encoder.encoder.branches})"
        )
        more += ", block_fn=block"
    return [*made, f'model = VisionTransformer(**json.loads(said["timm"]){more})']
