"""safetensors that open in timm's own classes; the metadata say which, under "architecture".

VisionTransformer, with our stem as its `embed_layer`. With the linear stem the file needs timm and
safetensors only:

    VisionTransformer(**json.loads(metadata["timm"])).load_state_dict(load_file(path))

With another stem one file of source is written beside it, which needs no mimkit either:

    import mimkit_stem_hmlp
    embed_layer = mimkit_stem_hmlp.embed_layer(json.loads(metadata["stem"])["settings"])
    model = VisionTransformer(**json.loads(metadata["timm"]), embed_layer=embed_layer)

An encoder of several branches a block is made of timm's ParallelThingsBlock. That is a class, which
JSON cannot hold, so the metadata of such a file say its name and its number of branches besides,
"block": {"name": "ParallelThingsBlock", "num_parallel": 2}. With the linear stem:

    block = partial(ParallelThingsBlock, num_parallel=json.loads(metadata["block"])["num_parallel"])
    model = VisionTransformer(**json.loads(metadata["timm"]), block_fn=block)
    model.load_state_dict(load_file(path))

Beit, for BEiT's relative positions, which VisionTransformer does not have; its stem is linear.

The other way, `load_timm_weights` reads the weights of such a VisionTransformer into an encoder.
"""

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from timm.layers.patch_embed import PatchEmbed
from timm.models.beit import Beit
from timm.models.vision_transformer import Block, ParallelThingsBlock, VisionTransformer
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.export import EXPORTERS, Exporter
from mimkit.export._headed import EncoderWithClassifier, classes_said
from mimkit.export._names import (
    check_equal_names,
    rename,
    with_full_bias,
    without_key_bias,
)
from mimkit.export._recipe import is_plain_linear, stem_recipe
from mimkit.export._tensors import read_tensors, write_tensors
from mimkit.export._timm_recipe import (
    beit_arguments,
    beit_table,
    block_recipe,
    check_beit,
    usage_of_vit,
    vit_arguments,
    vit_table,
)
from mimkit.export._timm_stem import StemEmbed, stem_file, stem_module
from mimkit.models.encoder import ImageEncoder
from mimkit.models.stems import STEMS
from mimkit.weight_names import BEIT_POSITIONS, reversed_table

FORMAT = "mimkit.timm.1"


@EXPORTERS.register
class Timm(Exporter):
    """One safetensors file: weights under timm's names, and in its metadata how to rebuild them."""

    library = "timm"

    def architecture(self, encoder: ImageEncoder) -> str:
        if encoder.encoder.positions not in BEIT_POSITIONS:
            return VisionTransformer.__name__
        check_beit(encoder)
        return Beit.__name__

    def write(self, encoder: ImageEncoder, path: Path, *, metadata: Mapping[str, str]) -> None:
        architecture = self.architecture(encoder)
        if architecture == Beit.__name__:
            weights = rename(without_key_bias(encoder.state_dict()), beit_table(encoder))
            arguments = beit_arguments(encoder)
        else:
            weights = rename(with_full_bias(encoder.state_dict()), vit_table(encoder))
            arguments = vit_arguments(encoder)
        recipe = {
            "mimkit_format": FORMAT,
            "architecture": architecture,
            "timm": json.dumps(arguments),
            "stem": json.dumps(stem_recipe(encoder.stem)),
            **block_recipe(encoder.encoder),
            **classes_said(encoder),
        }
        write_tensors(path, weights, metadata={**metadata, **recipe})

    def load(self, path: Path) -> nn.Module:
        metadata, weights = _read(path)
        arguments = json.loads(metadata["timm"])
        if metadata["architecture"] == Beit.__name__:
            model: nn.Module = Beit(**arguments)
        else:
            classes: dict[str, Any] = {
                "embed_layer": _embed_layer(json.loads(metadata["stem"])),
                "block_fn": _block(json.loads(metadata["block"])) if "block" in metadata else Block,
            }
            model = VisionTransformer(**arguments, **classes)
        check_equal_names(weights, model.state_dict())
        model.load_state_dict(weights)
        return model.eval()

    def tokens(self, loaded: nn.Module, image_BCHW: Tensor) -> Tensor:
        assert isinstance(loaded, VisionTransformer | Beit)
        tokens_BND: Tensor = loaded.forward_features(image_BCHW)
        return tokens_BND

    def at_size(self, loaded: nn.Module, height: int, width: int) -> nn.Module | None:
        """By timm's own `set_input_size`; Beit's has another rule for relative tables than ours."""
        if isinstance(loaded, Beit):
            return None
        assert isinstance(loaded, VisionTransformer)
        sized = copy.deepcopy(loaded)
        sized.set_input_size((height, width))
        resized: nn.Module = sized
        return resized

    def beside(self, encoder: ImageEncoder) -> Mapping[str, str]:
        if is_plain_linear(encoder.stem):
            return {}
        return {f"{stem_module(encoder.stem)}.py": stem_file(encoder.stem)}

    def usage(self, encoder: ImageEncoder, path: Path) -> str:
        kind = self.architecture(encoder)
        imports = [
            "import json",
            "from safetensors import safe_open",
            "from safetensors.torch import load_file",
            f"from timm.models import {kind}",
        ]
        made = [f'model = {kind}(**json.loads(said["timm"]))']
        if kind == VisionTransformer.__name__:
            made = usage_of_vit(encoder, imports)
        opened = [
            f'with safe_open("{path.name}", framework="pt") as file:',
            "    said = file.metadata()",
        ]
        loaded = [
            f'model.load_state_dict(load_file("{path.name}"))',
            _last_line(encoder),
        ]
        return "\n".join([*imports, *opened, *made, *loaded])


def _last_line(encoder: ImageEncoder) -> str:
    if isinstance(encoder, EncoderWithClassifier):
        return "logits = model.eval()(images)  # (B, V)"
    line = "tokens = model.eval().forward_features(images)  # (B, 1 + N, D)"
    if encoder.encoder.positions in BEIT_POSITIONS:
        return line  # Beit's rule for relative tables is another than ours
    return f"{line}; of another size after\n# model.set_input_size((height, width))"


def load(path: str | Path) -> nn.Module:
    """An exported file as timm's own model in eval mode; its output is the class token."""
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
    table = vit_table(model)
    expected = rename(model.state_dict(), table)
    try:
        check_equal_names(weights, expected)
    except ValueError as error:
        raise UserError(
            f"timm's {error}; both models need one size, one number of branches and the same "
            "image size, and timm's num_classes=0"
        ) from error
    model.load_state_dict(rename(weights, reversed_table(table)))


def _block(said: Mapping[str, Any]) -> Callable[..., nn.Module]:
    if said["name"] != ParallelThingsBlock.__name__:
        raise UserError(
            f"the file is made of blocks '{said['name']}', this mimkit knows "
            f"'{ParallelThingsBlock.__name__}'; use the version of mimkit that wrote it"
        )
    return partial(ParallelThingsBlock, num_parallel=said["num_parallel"])


def _embed_layer(recipe: Mapping[str, Any]) -> Callable[..., nn.Module]:
    stem = STEMS[recipe["name"]](**recipe["settings"])
    return PatchEmbed if is_plain_linear(stem) else partial(StemEmbed, stem=stem)


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    metadata, weights = read_tensors(path)
    found = metadata.get("mimkit_format", metadata.get("format"))
    if found != FORMAT:
        raise UserError(
            f"{path} says its format is '{found}', expected '{FORMAT}'; give a file written by "
            "`tools/export.py RUN --format timm OUT`"
        )
    # Files of mimkit 0.1 before there was a choice do not say it.
    return {"architecture": VisionTransformer.__name__, **metadata}, weights
