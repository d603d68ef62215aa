"""safetensors that open in timm's own VisionTransformer, with the stem as its `embed_layer`.

With the linear stem the file needs timm and safetensors only:

    VisionTransformer(**json.loads(metadata["timm"])).load_state_dict(load_file(path))

With another stem, `mimkit.export.timm.load(path)` builds the same timm model around it.

An encoder of several branches a block is made of timm's ParallelThingsBlock. That is a class, which
JSON cannot hold, so the metadata of such a file say its name and its number of branches besides,
"block": {"name": "ParallelThingsBlock", "num_parallel": 2}. With the linear stem:

    block = partial(ParallelThingsBlock, num_parallel=json.loads(metadata["block"])["num_parallel"])
    model = VisionTransformer(**json.loads(metadata["timm"]), block_fn=block)
    model.load_state_dict(load_file(path))

The other way, `load_timm_weights` reads the weights of such a model of timm's into an encoder.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, ParallelThingsBlock, VisionTransformer
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.export import EXPORTERS, Exporter
from mimkit.export._names import (
    TIMM_BLOCK,
    TIMM_LINEAR,
    TIMM_PARALLEL_BLOCK,
    TIMM_STEM,
    TIMM_TOKENS,
    check_equal_names,
    rename,
)
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.stems import STEMS, Stem

FORMAT = "mimkit.timm.1"


class StemEmbed(nn.Module):
    """A stem where timm expects a patch embedding; the arguments are those timm gives it."""

    def __init__(
        self,
        img_size: int | tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        bias: bool = True,
        dynamic_img_pad: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        stem: Stem,
    ) -> None:
        super().__init__()
        assert (in_chans, embed_dim, patch_size) == (3, stem.width, stem.patch_size)
        assert bias and not dynamic_img_pad
        height, width = img_size if isinstance(img_size, tuple | list) else (img_size, img_size)
        self.stem = stem.to(device=device, dtype=dtype)
        self.patch_size = (patch_size, patch_size)
        self.img_size = (height, width)
        self.grid_size = stem.grid(height, width)
        self.num_patches = self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        return self.patch_size[0] if as_scalar else self.patch_size

    def forward(self, image_BCHW: Tensor) -> Tensor:
        tokens_BND: Tensor = self.stem(image_BCHW)
        return tokens_BND


@EXPORTERS.register
class Timm(Exporter):
    """One safetensors file: weights under timm's names, and in its metadata how to rebuild them."""

    def write(self, encoder: ImageEncoder, path: Path, *, metadata: Mapping[str, str]) -> None:
        _check_fits(encoder.encoder)
        recipe = _recipe(encoder)
        weights = rename(_with_full_bias(encoder.state_dict()), _table(encoder))
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        # save_file would make a file that only its owner can read.
        path.write_bytes(save(contiguous, metadata={**metadata, **recipe}))

    def load(self, path: Path) -> nn.Module:
        metadata, weights = _read(path)
        classes: dict[str, Any] = {
            "embed_layer": _embed_layer(json.loads(metadata["stem"])),
            "block_fn": _block(json.loads(metadata["block"])) if "block" in metadata else Block,
        }
        model: nn.Module = VisionTransformer(**json.loads(metadata["timm"]), **classes)
        check_equal_names(weights, model.state_dict())
        model.load_state_dict(weights)
        return model.eval()

    def tokens(self, loaded: nn.Module, image_BCHW: Tensor) -> Tensor:
        assert isinstance(loaded, VisionTransformer)
        tokens_BND: Tensor = loaded.forward_features(image_BCHW)
        return tokens_BND


def load(path: str | Path) -> nn.Module:
    """An exported file as timm's VisionTransformer in eval mode; its output is the class token."""
    return Timm().load(Path(path))


def load_timm_weights(model: ImageEncoder, weights: Mapping[str, Tensor]) -> None:
    """Sets `model` to the weights of a timm VisionTransformer without a head.

    Args:
        model: with the sizes of timm's, layer_scale where that has init_values, qkv_bias="qkv", and
            as many branches as its ParallelThingsBlock has (1 for its Block); a linear stem for
            timm's PatchEmbed.
        weights: the state dict of timm's model; num_classes=0 makes one without a head.

    Raises:
        UserError: lists every name that is unused or unfilled, and weights of another shape.
    """
    if model.encoder.qkv_bias != "qkv":
        raise UserError(
            f"encoder.qkv_bias is {model.encoder.qkv_bias}, but timm's attention has a bias for "
            "keys too; make the encoder with encoder.qkv_bias=qkv"
        )
    table = _table(model)
    expected = rename(model.state_dict(), table)
    try:
        check_equal_names(weights, expected)
    except ValueError as error:
        raise UserError(
            f"timm's {error}; both models need one size, one number of branches and the same "
            "image size, and timm's num_classes=0"
        ) from error
    model.load_state_dict(rename(weights, {theirs: ours for ours, theirs in table.items()}))


def _table(model: ImageEncoder) -> dict[str, str]:
    """Ours -> timm's names for this stem and these blocks."""
    stem = TIMM_LINEAR if _is_linear(model.stem) else TIMM_STEM
    block = TIMM_BLOCK if model.encoder.branches == 1 else TIMM_PARALLEL_BLOCK
    return {**stem, **TIMM_TOKENS, **block}


def _check_fits(encoder: Encoder) -> None:
    if encoder.positions in ("relative", "relative_shared"):
        raise UserError(
            f"encoder.positions is {encoder.positions}, but timm's VisionTransformer has no "
            "relative position bias; pretrain with encoder.positions=absolute to export to timm"
        )


def _recipe(model: ImageEncoder) -> dict[str, str]:
    """Metadata from which the model is rebuilt: timm's arguments and the stem's."""
    encoder, stem = model.encoder, model.stem
    image_size = [side * stem.patch_size for side in encoder.grid]
    arguments = {
        "img_size": image_size,
        "patch_size": stem.patch_size,
        "embed_dim": encoder.width,
        "depth": encoder.depth,
        "num_heads": encoder.heads,
        "init_values": encoder.layer_scale,
        "pos_embed": "learn" if encoder.positions == "absolute" else "none",
        "final_norm": isinstance(encoder.norm, nn.LayerNorm),
        "qkv_bias": True,
        "class_token": True,
        "global_pool": "token",
        "num_classes": 0,
    }
    rebuild = {"name": stem.name, "settings": stem.settings}
    recipe = {"format": FORMAT, "timm": json.dumps(arguments), "stem": json.dumps(rebuild)}
    if encoder.branches > 1:
        block = {"name": ParallelThingsBlock.__name__, "num_parallel": encoder.branches}
        recipe["block"] = json.dumps(block)
    return recipe


def _block(said: Mapping[str, Any]) -> Callable[..., nn.Module]:
    if said["name"] != ParallelThingsBlock.__name__:
        raise UserError(
            f"the file is made of blocks '{said['name']}', this mimkit knows "
            f"'{ParallelThingsBlock.__name__}'; use the version of mimkit that wrote it"
        )
    return partial(ParallelThingsBlock, num_parallel=said["num_parallel"])


def _embed_layer(stem: Mapping[str, Any]) -> Callable[..., nn.Module]:
    if _is_patch_embed(stem["name"], stem["settings"]):
        return PatchEmbed
    return partial(StemEmbed, stem=STEMS[stem["name"]](**stem["settings"]))


def _is_linear(stem: Stem) -> bool:
    return _is_patch_embed(stem.name, stem.settings)


def _is_patch_embed(name: str, settings: Mapping[str, Any]) -> bool:
    """timm has the linear stem itself; a GELU behind it, it has not."""
    return name == "linear" and not settings.get("gelu", False)


def _with_full_bias(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """BEiT's separate query and value biases as one qkv bias whose key part is zero."""
    full = dict(weights)
    for name in weights:
        if name.endswith(".q_bias"):
            prefix = name.removesuffix("q_bias")
            q_bias, v_bias = full.pop(name), full.pop(f"{prefix}v_bias")
            full[f"{prefix}qkv.bias"] = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])
    return full


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path} as safetensors: {error}") from error
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"{path} says its format is '{metadata.get('format')}', expected '{FORMAT}'; give a "
            "file written by `tools/export.py RUN --format timm OUT`"
        )
    return metadata, weights
