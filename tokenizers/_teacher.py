"""A frozen network of timm's whose last feature map is a target, and the files it comes from.

Nothing is downloaded and nothing in a file is executed.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.beit import Beit
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.registry import nearest
from mimkit.tokenizers._network_file import drawn_from, fill, read_weights

EXPORTED = "mimkit.timm.1"  # the format that `mimkit export --format timm` writes
RANDOM = "random"
HOW_TO_MAKE_ONE = (
    "`mimkit export RUN teacher.safetensors` makes one of a pretraining with stem=linear, and "
    "`safetensors.torch.save_model(timm.create_model(NAME, pretrained=True), PATH)` one of timm's"
)
Pixels = tuple[float, float, float]


class Teacher(nn.Module):
    """A model of timm's as pixel_BCHW (normalised) -> feature_BVyx of its last block, normed.

    Args:
        model: any of timm's that has `forward_intermediates`.
        what: what a person calls it.
        mean, std: of the pixels it was trained on.
    """

    def __init__(self, model: Any, *, what: str, mean: Pixels, std: Pixels) -> None:
        super().__init__()
        last = model.feature_info[-1]
        self.model, self.what, self.mean, self.std = model, what, mean, std
        self.width, self.patch = int(last["num_chs"]), int(last["reduction"])
        embed = getattr(model, "patch_embed", None)
        strict = getattr(embed, "strict_img_size", True)
        self.fixed_size: tuple[int, int] | None = (
            getattr(embed, "img_size", None) if strict else None
        )

    def forward(self, pixel_BChw: Tensor) -> Tensor:
        feature_BVyx: Tensor = self.model.forward_intermediates(
            pixel_BChw, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True
        )[0]
        return feature_BVyx


def load_teacher(path: str, architecture: str | None) -> Teacher:
    """The teacher in fp32 on the CPU.

    Args:
        path: a file, or "random".
        architecture: timm's name; None where the file says it.

    Raises:
        UserError: there is no such file or architecture, or they do not fit each other.
    """
    if path == RANDOM:
        if architecture is None:
            raise UserError(
                f"tokenizer.path={RANDOM} draws a teacher; which one, says tokenizer.architecture"
            )
        return _timm_teacher(architecture, None, path)
    metadata, weights = read_weights(
        Path(path).expanduser(), what="a teacher's weights", remedy=HOW_TO_MAKE_ONE
    )
    if metadata.get("mimkit_format", metadata.get("format")) == EXPORTED:
        if architecture is not None:
            raise UserError(
                f"{path} is a file of `mimkit export`, which says itself what it is; leave out "
                f"tokenizer.architecture={architecture}"
            )
        return _exported_teacher(path, metadata, weights)
    if architecture is None:
        raise UserError(
            f"{path} does not say of which architecture its weights are; set "
            "tokenizer.architecture to timm's name of it, for example vit_base_patch16_224, or "
            f"give a file of `mimkit export`. {HOW_TO_MAKE_ONE}."
        )
    return _timm_teacher(architecture, weights, path)


def _timm_teacher(architecture: str, weights: Mapping[str, Tensor] | None, path: str) -> Teacher:
    if not timm.is_model(architecture):
        raise UserError(
            f"tokenizer.architecture={architecture}: this timm ({timm.__version__}) has no such "
            f"model.{nearest(architecture, timm.list_models())}"
        )
    with torch.device("meta"):
        outline = timm.create_model(architecture, pretrained=False, num_classes=0)
    if not hasattr(outline, "forward_intermediates"):
        raise UserError(
            f"tokenizer.architecture={architecture}: timm can not give features of its last block "
            "(it has no forward_intermediates); choose another, for example vit_base_patch16_224"
        )
    resamples = {"dynamic_img_size": True} if isinstance(outline, VisionTransformer) else {}
    with drawn_from(0):
        model = timm.create_model(architecture, pretrained=False, num_classes=0, **resamples)
    cfg = outline.default_cfg
    if weights is not None:
        heads = cfg["classifier"] if isinstance(cfg["classifier"], tuple) else (cfg["classifier"],)
        heads = tuple(f"{head}." for head in heads if head)
        kept = {name: weight for name, weight in weights.items() if not name.startswith(heads)}
        fill(model, kept, path=path, remedy=HOW_TO_MAKE_ONE)
    what = f"{architecture}, random weights" if weights is None else architecture
    return Teacher(model, what=what, mean=tuple(cfg["mean"]), std=tuple(cfg["std"]))


def _exported_teacher(
    path: str, metadata: Mapping[str, str], weights: Mapping[str, Tensor]
) -> Teacher:
    arguments, stem = json.loads(metadata["timm"]), json.loads(metadata["stem"])
    if stem["name"] != "linear" or stem["settings"]["gelu"]:
        raise UserError(
            f"{path} has the stem '{stem['name']}' {stem['settings']}, which timm does not know: a "
            "teacher needs stem.name=linear. For another, write a tokenizer of your own around "
            "mimkit.export.timm.load (README, 'Adding a part')"
        )
    with drawn_from(0):
        if metadata.get("architecture") == Beit.__name__:
            model: nn.Module = Beit(**arguments)
        else:
            model = VisionTransformer(**arguments, **_blocks(metadata), dynamic_img_size=True)
    fill(model, weights, path=path, remedy=HOW_TO_MAKE_ONE)
    mean, std = (tuple(json.loads(metadata[name])) for name in ("mean", "std"))
    what = f"encoder of width {arguments['embed_dim']}, {arguments['depth']} blocks"
    return Teacher(model, what=what, mean=mean, std=std)


def _blocks(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The blocks of an encoder of several branches, which its arguments can not name."""
    if "block" not in metadata:
        return {}
    branches = json.loads(metadata["block"])["num_parallel"]
    return {"block_fn": partial(ParallelThingsBlock, num_parallel=branches)}
