"""Tensors and a few strings in one safetensors file: nothing in it is ever executed."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimkit.errors import UserError
from mimkit.weight_files import cut_short, write_safetensors

_PICKLES = (b"PK", b"\x80")  # a zip, as torch.save makes them, and a bare pickle


def write_tensors(
    path: Path, weights: Mapping[str, Tensor], *, metadata: Mapping[str, str]
) -> None:
    """`format: pt` is what transformers asks for."""
    write_safetensors(path, weights, metadata={"format": "pt", **metadata})


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and weights; UserError where the file is no safetensors, by name for a pickle."""
    try:
        with safe_open(path, framework="pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        if _is_pickle(path):
            raise UserError(
                f"{path} is a pickle or an archive of pickles, which could run anything when it is "
                "read, so it was not; mimkit reads encoders from safetensors only: give a run "
                "folder, a checkpoint, or a file written by `tools/export.py RUN --format "
                "safetensors OUT`"
            ) from error
        short = cut_short(path) if path.is_file() else None
        raise UserError(f"cannot read {path} as safetensors: {short or error}") from error
    return metadata, weights


def _is_pickle(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(2).startswith(_PICKLES)
