"""The official BEiT code, from a path that the user gives: timed beside ours, never part of it."""

import functools
import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import nn

from mimkit.bench.workload import DROP_PATH, VOCABULARY
from mimkit.errors import UserError
from mimkit.models.sizes import SIZES

_FILES = ("modeling_pretrain.py", "modeling_finetune.py")


def official_model(folder: str, size: str) -> nn.Module:
    """The code's own model, as its README has it pretrained: (image, mask) -> predictions.

    The code wants a timm of 2021; only the names that moved since are put where it looks for them.
    Its files are run: name a checkout that you trust.

    Raises:
        UserError: the folder does not hold the code, or it cannot be imported.
    """
    path = Path(folder).expanduser()
    if missing := [name for name in _FILES if not (path / name).is_file()]:
        raise UserError(
            f"--against={folder} has no {', '.join(missing)}; give the folder beit of a checkout "
            "of github.com/microsoft/unilm"
        )
    with _old_timm(), _first_on_path(path):
        try:
            module = importlib.import_module("modeling_pretrain")
        except ImportError as error:
            raise UserError(f"--against={folder} cannot be imported: {error}") from error
    width, heads, depth = SIZES[size]
    model = module.VisionTransformerForMaskedImageModeling(
        patch_size=16, embed_dim=width, depth=depth, num_heads=heads, mlp_ratio=4, qkv_bias=True,
        norm_layer=functools.partial(nn.LayerNorm, eps=1e-6), vocab_size=VOCABULARY,
        drop_path_rate=DROP_PATH, use_shared_rel_pos_bias=True, use_abs_pos_emb=False,
        init_values=0.1,
    )  # fmt: skip
    return cast(nn.Module, model)


@contextmanager
def _old_timm() -> Iterator[None]:
    """`timm.models.layers` and `timm.models.registry`, as they were called."""
    layers = importlib.import_module("timm.layers")
    old: Any = types.ModuleType("timm.models.layers")
    old.drop_path, old.to_2tuple = layers.drop_path, layers.to_2tuple
    old.trunc_normal_ = layers.trunc_normal_
    registry: Any = types.ModuleType("timm.models.registry")
    registry.register_model = lambda function: function
    modules = {"timm.models.layers": old, "timm.models.registry": registry}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@contextmanager
def _first_on_path(path: Path) -> Iterator[None]:
    sys.path.insert(0, str(path))
    try:
        yield
    finally:
        sys.path.remove(str(path))
