"""mimkit: masked image modelling with pluggable patch stems. Importing it does no work."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`load_encoder`, imported (and torch with it) when it is first asked for."""
    if name == "load_encoder":
        return importlib.import_module("mimkit.encoder_io").load_encoder
    raise AttributeError(f"module 'mimkit' has no attribute '{name}'")
