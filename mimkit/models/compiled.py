"""Blocks compiled one at a time: one graph, made once, serves them all."""

import shutil

import torch

from mimkit.errors import UserError
from mimkit.models.encoder import Encoder

_COMPILERS = ("g++", "clang++", "c++")


def compile_blocks(encoder: Encoder) -> None:
    """Compiles every block in place; names, weights and what is exported stay as they are.

    The whole model took 60-100 s to compile and was not faster.
    """
    for block in encoder.blocks:
        block.compile(dynamic=False)


def check_compiler(device: torch.device) -> None:
    """UserError, before any work, where torch.compile would fail in the first step."""
    if not any(shutil.which(name) for name in _COMPILERS):
        raise UserError(
            f"engine.compile=block needs a C++ compiler and found none of {', '.join(_COMPILERS)}; "
            "install g++, or set engine.compile=false"
        )
    if device.type == "cuda" and not torch.utils._triton.has_triton():
        raise UserError(
            "engine.compile=block needs triton for this GPU, which cannot be imported or does not "
            "support it; pip install triton, or set engine.compile=false"
        )
