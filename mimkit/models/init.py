"""BEiT's initialisation, drawn parameter by parameter so that study arms start paired."""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.mim import MaskedImageModel
from mimkit.models.positions import RelativePositionBias
from mimkit.models.stems import Stem
from mimkit.random import Purpose, torch_generator

STD = 0.02
Fill = Callable[[Tensor, torch.Generator], object]


def initialise(model: MaskedImageModel | ImageEncoder, *, seed: int) -> None:
    """Sets every parameter and running statistic; calling it again gives the same model.

    Truncated normal of std 0.02 cut at one std for weights of Linear and Conv2d, for tokens and
    positions; zero for biases and relative positions; one for norms. Then what a block adds to the
    residual stream is divided by sqrt(2 * block), block counted from 1 (unilm
    `modeling_pretrain.py`). Each parameter draws from a generator keyed by its name, so parameters
    of equal name and shape are equal in models that differ elsewhere.
    """
    _fill(model, seed=seed, layer_scale=model.encoder.layer_scale)
    _rescale_residuals(model.encoder)


def initialise_stem(stem: Stem, *, seed: int) -> None:
    """A stem on its own as it starts in a model."""
    _fill(stem, seed=seed, layer_scale=None, prefix="stem.")


@torch.no_grad()
def _fill(module: nn.Module, *, seed: int, layer_scale: float | None, prefix: str = "") -> None:
    rules = _rules(module, layer_scale=layer_scale)
    if missing := [name for name, _ in module.named_parameters() if name not in rules]:
        raise ValueError(f"no rule initialises {', '.join(missing)}; add one to {__name__}")
    for name, parameter in module.named_parameters():
        draw = torch_generator(Purpose.INIT, seed=seed, sample=_number(prefix + name))
        value = torch.empty(parameter.shape)
        rules[name](value, draw)
        parameter.copy_(value)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.reset_running_stats()


def _rules(model: nn.Module, *, layer_scale: float | None) -> dict[str, Fill]:
    """Parameter name -> what fills it, by the kind of module that owns the parameter."""
    rules: dict[str, Fill] = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if rule := _rule(module, name, layer_scale=layer_scale):
                rules[f"{prefix}.{name}" if prefix else name] = rule
    return rules


def _rule(module: nn.Module, name: str, *, layer_scale: float | None) -> Fill | None:
    if name in ("cls_token", "mask_token", "pos_embed"):
        return truncated_normal
    if isinstance(module, RelativePositionBias) or name in ("bias", "q_bias", "v_bias"):
        return _constant(0.0)
    if isinstance(module, nn.Linear | nn.Conv2d):
        return truncated_normal
    if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
        return _constant(1.0)
    if name == "gamma" and layer_scale is not None:
        return _constant(layer_scale)
    return None


def truncated_normal(value: Tensor, draw: torch.Generator, *, std: float = STD) -> Tensor:
    """Fills `value` with a normal of `std` cut at one std, by its inverse distribution function.

    nn.init.trunc_normal_ rejects and redraws: 25 times as long (11 s for ViT-B on one core), and
    its draws differ between versions of torch.
    """
    share = math.erf(math.sqrt(0.5))  # of the normal within one std
    value.uniform_(-share, share, generator=draw).erfinv_()
    return value.mul_(math.sqrt(2) * std).clamp_(-std, std)


def _constant(constant: float) -> Fill:
    return lambda value, _: value.fill_(constant)


@torch.no_grad()
def _rescale_residuals(encoder: Encoder) -> None:
    """Deeper blocks add to a stream that already has their predecessors' variance."""
    for number, block in enumerate(encoder.blocks, start=1):
        for name, parameter in block.named_parameters():
            if name.endswith(("attn.proj.weight", "mlp.fc2.weight")):
                parameter.div_(math.sqrt(2 * number))


def _number(name: str) -> int:
    """63 bits of a name, the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
