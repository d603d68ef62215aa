"""The file a dVAE lies in: safetensors with its sizes and history as JSON. Never a pickle."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimkit.errors import UserError
from mimkit.files import atomic_file
from mimkit.tokenizers._dvae_model import Dvae

METADATA_KEY = "mimkit.dvae"
HOW_TO_MAKE_ONE = "tools/train_tokenizer.py makes one"


class DvaeSettings(BaseModel):
    """What a file says about the dVAE in it; everything but `training` decides the tokens."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal[1] = 1
    width: int = Field(ge=4, le=4096, multiple_of=4)
    blocks: int = Field(ge=1, le=64)
    vocabulary: int = Field(ge=2, le=2**20)
    downsampling: Literal[8] = 8
    pixel_mapping: Literal["0.8 * x + 0.1"] = "0.8 * x + 0.1"
    training: dict[str, Any] = Field(default_factory=dict)


def save_dvae(path: Path, dvae: Dvae, *, settings: Mapping[str, object], half: bool) -> None:
    """Writes the dVAE so that the file is either complete or not there.

    Args:
        path: of the file; it is replaced if it exists.
        dvae: what to write, encoder and decoder.
        settings: how it was trained, anything that JSON can hold; kept beside the sizes.
        half: store fp16, half the size; `load_dvae` gives fp32 of the rounded weights.
    """
    header = DvaeSettings(
        width=dvae.width, blocks=dvae.blocks, vocabulary=dvae.vocabulary, training=dict(settings)
    )
    dtype = torch.float16 if half else torch.float32
    weights = {
        name: weight.detach().to("cpu", dtype).contiguous()
        for name, weight in dvae.state_dict().items()
    }
    with atomic_file(path) as temporary:
        safetensors.torch.save_file(weights, temporary, {METADATA_KEY: header.model_dump_json()})
        temporary.chmod(0o644)  # safetensors makes it readable for its owner only


def load_dvae(path: Path) -> tuple[Dvae, DvaeSettings]:
    """The dVAE in fp32 on the CPU, and what its file says about it.

    Raises:
        UserError: the file is missing, text, a pickle, cut short, or holds something else.
    """
    try:
        _refuse_what_is_no_safetensors(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"the tokenizer file '{path}' can not be read as safetensors ({error}); it holds "
            f"{path.stat().st_size:,} bytes and may be cut short. Copy it again; {HOW_TO_MAKE_ONE}."
        ) from error
    settings = _settings(path, metadata, names=list(weights))
    return _filled(path, settings, weights), settings


def _refuse_what_is_no_safetensors(path: Path) -> None:
    """Looks at the first bytes only, so a 400 MB pickle is refused at once and never executed."""
    if not path.is_file():
        raise UserError(f"there is no tokenizer file '{path}'; {_beside(path)}. {HOW_TO_MAKE_ONE}.")
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise UserError(f"the tokenizer file '{path}' is empty. {HOW_TO_MAKE_ONE}.")
    if _is_safetensors(head):
        return
    if head.startswith((b"PK\x03\x04", b"\x80")):  # torch.save's zip; pickle protocols 2 and up
        raise UserError(
            f"the tokenizer file '{path}' is a pickle (what torch.save writes: .pkl, .pth, .pt). "
            "mimkit never unpickles, because a pickle can run any code; it reads safetensors "
            f"only, and {HOW_TO_MAKE_ONE}."
        )
    if _is_text(head):
        raise UserError(
            f"the tokenizer file '{path}' is text, not safetensors; it begins with "
            f"{head[:40].decode(errors='replace')!r}. A failed download or a Git LFS pointer "
            f"looks like this. {HOW_TO_MAKE_ONE}."
        )


def _beside(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder '{folder}' does not exist either"
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    return f"'{folder}' holds {', '.join(names) if names else 'no safetensors file'}"


def _is_safetensors(head: bytes) -> bool:
    """64 bits of header length, then JSON. Looked at first: that length may begin with 0x80."""
    return head[4:9] == b"\0\0\0\0{"


def _is_text(head: bytes) -> bool:
    return all(byte >= 32 or byte in b"\t\n\r" for byte in head)


def _settings(path: Path, metadata: Mapping[str, str], *, names: list[str]) -> DvaeSettings:
    if METADATA_KEY not in metadata:
        raise UserError(
            f"the tokenizer file '{path}' is safetensors of something else: it lacks the entry "
            f"'{METADATA_KEY}' in its metadata. It holds {_some(names)}. {HOW_TO_MAKE_ONE}."
        )
    try:
        return DvaeSettings.model_validate_json(metadata[METADATA_KEY])
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'settings'}: {item['msg']}"
            for item in error.errors()
        )
        raise UserError(
            f"the settings in the tokenizer file '{path}' are not those of a dVAE of this version "
            f"of mimkit ({wrong}). {HOW_TO_MAKE_ONE}."
        ) from error


def _filled(path: Path, settings: DvaeSettings, weights: Mapping[str, Tensor]) -> Dvae:
    dvae = Dvae(
        width=settings.width,
        blocks=settings.blocks,
        vocabulary=settings.vocabulary,
        device="meta",
    )
    shapes = {name: weight.shape for name, weight in dvae.state_dict().items()}
    problems = {
        "missing": [name for name in shapes if name not in weights],
        "not used": [name for name in weights if name not in shapes],
        "of another shape": [
            name for name in shapes if name in weights and weights[name].shape != shapes[name]
        ],
        "not finite": [name for name in weights if not weights[name].isfinite().all()],
    }
    found = [f"{_some(names)} {what}" for what, names in problems.items() if names]
    if found:
        raise UserError(
            f"the weights in the tokenizer file '{path}' do not fit its settings (width "
            f"{settings.width}, blocks {settings.blocks}, vocabulary {settings.vocabulary}): "
            f"{'; '.join(found)}. {HOW_TO_MAKE_ONE}."
        )
    fp32 = {name: weight.float() for name, weight in weights.items()}
    dvae.load_state_dict(fp32, assign=True)
    return dvae


def _some(names: list[str], *, limit: int = 4) -> str:
    shown = ", ".join(names[:limit]) or "no tensor"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
