"""A folder that opens in HuggingFace's transformers: config.json, weights, preprocessor.

ViTModel or BeitModel where the encoder is one (a plain linear stem, square images, one branch a
block); with the mask token and the head BeitForMaskedImageModeling, and a classifier
ViTForImageClassification or BeitForImageClassification. Any other encoder becomes a
folder with its own modelling file, made of mimkit's sources, which
`AutoModel.from_pretrained(folder, trust_remote_code=True)` loads without mimkit (it needs timm and
einops); its model.safetensors is also one of mimkit's own.
"""

import contextlib
import inspect
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.export import EXPORTERS, Exporter
from mimkit.export._headed import EncoderWithClassifier, EncoderWithHead, has_norm
from mimkit.export._hf_template import CLASSIFIER, IMPORTS, MODEL
from mimkit.export._images import check_images
from mimkit.export._names import (
    HF_CLASSIFIER,
    HF_HEAD,
    HF_LAYERS,
    HF_NORM,
    HF_POOLED,
    rename,
    split_qkv,
)
from mimkit.export._optional import optional
from mimkit.export._pretrained import Normalisation, save_encoder
from mimkit.export._recipe import encoder_recipe, is_plain_linear
from mimkit.export._standalone import standalone
from mimkit.export._tensors import write_tensors
from mimkit.models.blocks import EPS
from mimkit.models.encoder import ImageEncoder
from mimkit.models.resize import resized
from mimkit.weight_names import HF_POSITIONS, HF_TOKENS

_OWN = "MimkitModel"
_OWN_CLASSIFIER = "MimkitForImageClassification"
_OURS = (_OWN, _OWN_CLASSIFIER)
_WITH_HEAD = "BeitForMaskedImageModeling"
_MODULE = "modeling_mimkit"
_AUTO = {_OWN: "AutoModel", _OWN_CLASSIFIER: "AutoModelForImageClassification"}


@EXPORTERS.register
class Hf(Exporter):
    """Holds every encoder; the class says how well other tools know it."""

    library = "transformers"
    is_folder = True
    holds_head = True
    packages = ("transformers",)

    def architecture(self, encoder: ImageEncoder) -> str:
        others = _not_native(encoder)
        if isinstance(encoder, EncoderWithHead):
            _check_head(others)
            return _WITH_HEAD
        classifies = isinstance(encoder, EncoderWithClassifier)
        if others:
            return _OWN_CLASSIFIER if classifies else _OWN
        inner = encoder.encoder
        plain = (inner.positions, inner.layer_scale, inner.qkv_bias) == ("absolute", None, "qkv")
        if isinstance(encoder, EncoderWithClassifier):
            # ViT's takes the class token behind the norm, and no mean
            plain = plain and encoder.normed_first
            return "ViTForImageClassification" if plain else "BeitForImageClassification"
        return "ViTModel" if plain else "BeitModel"

    def write(self, encoder: ImageEncoder, path: Path, *, metadata: Mapping[str, str]) -> None:
        architecture = self.architecture(encoder)
        if architecture in _OURS:
            _write_own(encoder, path, metadata)
        else:
            _write_native(encoder, path, metadata, architecture)
        _processor(metadata).save_pretrained(path)

    def load(self, path: Path) -> nn.Module:
        """Runs the folder's modelling file where it has one: for folders of your own only."""
        library = optional("transformers")
        name = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        kind = getattr(library, _AUTO.get(name, name))
        more: dict[str, Any] = {"trust_remote_code": True} if name in _OURS else {}
        if name == "ViTModel":
            more["add_pooling_layer"] = False
        with _quiet(library):
            model, found = kind.from_pretrained(path, output_loading_info=True, **more)
        if any(found.values()):
            raise UserError(f"transformers' {name} did not load {path} whole: {found}")
        if name in _OURS and path.name.startswith("."):
            _forget(type(model))
        loaded: nn.Module = model.eval()
        return loaded

    def tokens(self, loaded: nn.Module, image_BCHW: Tensor) -> Tensor:
        tokens_BND: Tensor = loaded(pixel_values=image_BCHW).last_hidden_state
        return tokens_BND

    def predictions(self, loaded: nn.Module, image_BCHW: Tensor, mask_BN: Tensor) -> Tensor:
        logits_BNV: Tensor = loaded(pixel_values=image_BCHW, bool_masked_pos=mask_BN).logits
        return logits_BNV[mask_BN]

    def logits(self, loaded: nn.Module, image_BCHW: Tensor) -> Tensor:
        logits_BV: Tensor = loaded(pixel_values=image_BCHW).logits
        return logits_BV

    def at_size(self, loaded: nn.Module, height: int, width: int) -> nn.Module | None:
        """Ours; transformers' own classes interpolate positions by other rules."""
        return loaded if type(loaded).__name__ in _OURS else None

    def usage(self, encoder: ImageEncoder, path: Path) -> str:
        name = self.architecture(encoder)
        kind, more = _AUTO.get(name, name), ", trust_remote_code=True" if name in _OURS else ""
        more += ", add_pooling_layer=False" if name == "ViTModel" else ""
        result, output = "tokens", "last_hidden_state  # (B, 1 + N, D)"
        if isinstance(encoder, EncoderWithClassifier):
            result, output = "logits", "logits  # (B, V); model.config.id2label names them"
        if name == _WITH_HEAD:
            output = "logits  # (B, N, V); give bool_masked_pos to mask patches"
        return (
            f"from transformers import {kind}\n"
            f'model = {kind}.from_pretrained("{path.name}"{more})\n'
            f"{result} = model.eval()(pixel_values=images).{output}"
        )


def _not_native(model: ImageEncoder) -> list[str]:
    """Why transformers' own classes cannot be this encoder; empty where they can."""
    encoder = model.encoder
    reasons = {
        f"the stem '{model.stem.name}' (theirs is linear)": not is_plain_linear(model.stem),
        f"blocks of {encoder.branches} branches": encoder.branches > 1,
        f"a grid of {encoder.grid[0]}x{encoder.grid[1]} patches (theirs is square)": (
            encoder.grid[0] != encoder.grid[1]
        ),
        "no norm after the last block": not (
            has_norm(model) or isinstance(model, EncoderWithClassifier)
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


def _check_head(others: list[str]) -> None:
    if others:
        raise UserError(
            f"transformers' {_WITH_HEAD} cannot have {' and '.join(others)}; leave --with-head out "
            "(the folder then has its own modelling file), or add --fold if the stem is linear_bn"
        )


def _write_native(
    model: ImageEncoder, path: Path, metadata: Mapping[str, str], architecture: str
) -> None:
    is_vit = architecture.startswith("ViT")
    weights = split_qkv(model.state_dict(), key_bias=is_vit)
    named = rename(weights, _table(model, prefix="vit." if is_vit else "beit."))
    write_tensors(path / "model.safetensors", named, metadata=metadata)
    library = optional("transformers")
    settings = {**_sizes(model), **_labels(model)}
    if is_vit:
        config = library.ViTConfig(**settings, qkv_bias=True)
    else:
        config = library.BeitConfig(**settings, **_beit(model))
    config.architectures = [architecture]
    config.save_pretrained(path)


def _table(model: ImageEncoder, *, prefix: str) -> dict[str, str]:
    """Ours -> theirs; where there is a head, the encoder stands under a prefix beside it."""
    table = {**HF_TOKENS, **HF_LAYERS, **HF_POSITIONS.get(model.encoder.positions, {})}
    if isinstance(model, EncoderWithClassifier):
        table |= HF_NORM if model.normed_first else HF_POOLED
    elif not isinstance(model, EncoderWithHead):
        return table
    head = HF_HEAD if isinstance(model, EncoderWithHead) else HF_CLASSIFIER
    return {**{ours: f"{prefix}{theirs}" for ours, theirs in table.items()}, **head}


def _labels(model: ImageEncoder) -> dict[str, Any]:
    if not isinstance(model, EncoderWithClassifier):
        return {}
    names = model.classes or [f"LABEL_{number}" for number in range(model.num_classes)]
    return {"id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)}}  # fmt: skip


def _sizes(model: ImageEncoder) -> dict[str, Any]:
    encoder, patch = model.encoder, model.stem.patch_size
    return {
        "hidden_size": encoder.width,
        "num_hidden_layers": encoder.depth,
        "num_attention_heads": encoder.heads,
        "intermediate_size": 4 * encoder.width,
        "layer_norm_eps": EPS,  # transformers' default is 1e-12
        "image_size": encoder.grid[0] * patch,
        "patch_size": patch,
    }


def _beit(model: ImageEncoder) -> dict[str, Any]:
    encoder, scale = model.encoder, model.encoder.layer_scale
    given: dict[str, Any] = {
        "use_absolute_position_embeddings": encoder.positions == "absolute",
        "use_relative_position_bias": encoder.positions == "relative",
        "use_shared_relative_position_bias": encoder.positions == "relative_shared",
        # Only where it starts; 0 is "without".
        "layer_scale_init_value": 0.0 if scale is None else scale or 1e-5,
        "drop_path_rate": 0.0,
        "use_mean_pooling": False,  # this is the norm after the last block
    }
    if isinstance(model, EncoderWithHead):  # its norm is the head's
        given |= {"use_mask_token": True, "vocab_size": model.head.out_features,
                  "use_mean_pooling": True}  # fmt: skip
    if isinstance(model, EncoderWithClassifier):
        given["use_mean_pooling"] = model.pooling == "mean"
    return given


def _write_own(model: ImageEncoder, path: Path, metadata: Mapping[str, str]) -> None:
    kind, name = type(model.stem), Hf().architecture(model)
    header = f"An encoder of mimkit's with the stem {kind.__name__}; made by an export."
    source = standalone(
        kind, ImageEncoder, resized, check_images, header=header, more_imports=IMPORTS
    )
    classifies = isinstance(model, EncoderWithClassifier)
    text = source + MODEL.format(stem=kind.__name__) + (CLASSIFIER if classifies else "")
    (path / f"{_MODULE}.py").write_text(text, encoding="utf-8")
    config = {
        "model_type": "mimkit_encoder",
        "architectures": [name],
        "auto_map": {"AutoConfig": f"{_MODULE}.MimkitConfig", _AUTO[name]: f"{_MODULE}.{name}"},
        "dtype": "float32",
        "stem": model.stem.settings,
        "encoder": encoder_recipe(model.encoder),
        **_labels(model),
    }
    if isinstance(model, EncoderWithClassifier):
        config["pooling"], config["pool_norm"] = model.pooling, model.has_pool_norm
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if classifies:
        write_tensors(path / "model.safetensors", model.state_dict(), metadata=metadata)
        return
    mean, std = (tuple(json.loads(metadata[name])) for name in ("mean", "std"))
    pixels = Normalisation(mean, std)
    save_encoder(path / "model.safetensors", model, normalisation=pixels, about=metadata)


def _processor(metadata: Mapping[str, str]) -> Any:
    """The view of our evaluations: the largest central square, resized; other shapes whole."""
    height, width = json.loads(metadata["image_size"])
    square = height == width
    return optional("transformers").ViTImageProcessor(
        size={"shortest_edge": height} if square else {"height": height, "width": width},
        do_center_crop=square,
        crop_size={"height": height, "width": width},
        resample=3,  # bicubic
        image_mean=json.loads(metadata["mean"]),
        image_std=json.loads(metadata["std"]),
    )


@contextlib.contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Without progress bars of a second."""
    logging = library.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _forget(kind: type) -> None:
    """Takes the proof's copy of the modelling file out of transformers' cache: its folder is none
    that anybody will load again."""
    copied = Path(inspect.getfile(kind)).parents[1]
    shutil.rmtree(copied, ignore_errors=True)
