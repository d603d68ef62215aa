"""Weights out of a file, whatever wraps them: their names begin at the patch embedding."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimkit import __version__
from mimkit.errors import UserError
from mimkit.importing._torch_file import read_torch
from mimkit.importing.schemes import STEM_WEIGHTS
from mimkit.weight_files import cut_short

_ZIP_OR_PICKLE = (b"PK", b"\x80")
_OWN = "mimkit.encoder."  # how the names of our own format begin


@dataclass(frozen=True)
class Found:
    """Weights of a file.

    Attributes:
        wrapper: the name in the file under which they stood, such as "model"; "" for none.
        prefix: what stood before the names of the encoder, such as "module."; "" for nothing.
        heads: what transformers' config.json beside the file says; None where there is none.
    """

    weights: Mapping[str, Tensor]
    wrapper: str
    prefix: str
    heads: int | None


def read_weights(path: Path) -> Found:
    """UserError where it is no file of weights, or one that mimkit opens itself."""
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise UserError(f"there is no file {path}; give a .safetensors or a .pth of weights")
    with path.open("rb") as file:
        head = file.read(16)
    # safetensors begin with the length of a JSON, which might begin with the same bytes
    if head.startswith(_ZIP_OR_PICKLE) and head[8:9] != b"{":
        wrapper, weights = read_torch(path)
    else:
        wrapper, weights = "", _read_safetensors(path, head)
    prefix = _prefix(path, weights)
    stripped = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    if len(stripped) < len(weights):
        raise UserError(
            f"{path} has weights of one name with and without '{prefix}'; save one encoder alone"
        )
    return Found(stripped, wrapper, prefix, _heads_beside(path))


def _read_safetensors(path: Path, head: bytes) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as opened:
            _check_version(path, opened.metadata() or {})
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        if short := cut_short(path):
            raise UserError(f"{path} is not complete: {short}") from error
        raise UserError(
            f"{path} is neither safetensors nor a file of torch.save; it begins with {head!r} "
            f"({error}). Is the download complete, and not the text of an error page?"
        ) from error


def _check_version(path: Path, metadata: Mapping[str, str]) -> None:
    wrote = metadata.get("mimkit_version", __version__)
    if _numbers(wrote) > _numbers(__version__):
        raise UserError(
            f"{path} was written by mimkit {wrote}, this is mimkit {__version__}, which may not "
            "know all that is in it; install that version or a newer one"
        )
    if metadata.get("mimkit_format", "").startswith(_OWN):
        raise UserError(
            f'{path} is mimkit\'s own already: mimkit.load_encoder("{path.name}") opens it as it is'
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _heads_beside(path: Path) -> int | None:
    config = path.with_name("config.json")
    if path.name != "model.safetensors" or not config.is_file():
        return None
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config} is no JSON ({error}); mend it or move it away") from error
    heads = said.get("num_attention_heads") if isinstance(said, dict) else None
    return heads if isinstance(heads, int) else None


def _prefix(path: Path, weights: Mapping[str, Tensor]) -> str:
    """What stands before the patch embedding's name: "" where there is none at all."""
    found = {name.removesuffix(stem) for name in weights for stem in STEM_WEIGHTS
             if name == stem or name.endswith(f".{stem}")}  # fmt: skip
    if len(found) > 1:
        raise UserError(
            f"{path} holds {len(found)} encoders, under {', '.join(sorted(map(repr, found)))}; "
            "save one of them alone"
        )
    return next(iter(found), "")
