"""An encoder as data: the stem's name and settings and the encoder's arguments, and back."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.stems import STEMS, Stem

Recipe = dict[str, Any]  # of what JSON can hold


def stem_recipe(stem: Stem) -> Recipe:
    return {"name": stem.name, "settings": stem.settings}


def encoder_recipe(encoder: Encoder) -> Recipe:
    return {
        "width": encoder.width,
        "heads": encoder.heads,
        "depth": encoder.depth,
        "grid": list(encoder.grid),
        "positions": encoder.positions,
        "layer_scale": encoder.layer_scale,
        "qkv_bias": encoder.qkv_bias,
        "branches": encoder.branches,
        "final_norm": isinstance(encoder.norm, nn.LayerNorm),
    }


def rebuilt(*, stem: Mapping[str, Any], encoder: Mapping[str, Any]) -> ImageEncoder:
    """The encoder of these recipes, its weights not yet set."""
    rows, columns = encoder["grid"]
    made = STEMS[stem["name"]](**stem["settings"])
    return ImageEncoder(made, Encoder(**{**encoder, "grid": (rows, columns)}))


def is_plain_linear(stem: Stem) -> bool:
    """Whether it is the patch embedding that other libraries have: no norm, no GELU behind it."""
    return stem.name == "linear" and not stem.settings["gelu"]
