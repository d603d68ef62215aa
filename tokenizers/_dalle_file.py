"""The files that DALL-E's weights lie in, and the one that we make of them.

Read are OpenAI's pickled modules and OpenMMLab's state dict, which are never executed (see
`_dalle_pickle`), and safetensors. What is written is safetensors, with where it is from as JSON.
"""

from pathlib import Path
from typing import Literal

import safetensors.torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimkit.errors import UserError
from mimkit.files import atomic_file, sha256
from mimkit.tokenizers._dalle_layouts import PICKLE, ZIP, read_torch_file
from mimkit.tokenizers._dalle_pickle import RefusedError
from mimkit.tokenizers._dalle_weights import HOW_TO_GET_IT, DalleWeights, Part, checked_weights

METADATA_KEY = "mimkit.dalle"


class DalleHeader(BaseModel):
    """What a file of ours says about the weights in it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal[1] = 1
    part: Part
    width: int
    blocks: int
    vocabulary: int
    weights_sha256: str  # `DalleWeights.sha256`
    source: str  # name of the file that was converted
    source_sha256: str


def load_dalle(path: Path) -> DalleWeights:
    """The encoder or the decoder, in fp32, out of any of the known files.

    Raises:
        UserError: the file is missing, text, cut short, holds something else, or asks for code.
    """
    found, header = _read(path)
    loaded = checked_weights(path, found)
    if header is not None and header.weights_sha256 != loaded.sha256:
        raise UserError(
            f"the weights in '{path}' are not those that were written there: their sha256 is "
            f"{loaded.sha256}, but the file says {header.weights_sha256}. Copy it again, or "
            f"convert {header.source} again."
        )
    return loaded


def convert_dalle(source: Path, out: Path) -> DalleWeights:
    """Writes the weights in `source` as safetensors, wholly or not at all, and returns them.

    Raises:
        UserError: see `load_dalle`; or `out` cannot be written.
    """
    loaded = load_dalle(source)
    header = DalleHeader(
        part=loaded.part,
        width=loaded.width,
        blocks=loaded.blocks,
        vocabulary=loaded.vocabulary,
        weights_sha256=loaded.sha256,
        source=source.name,
        source_sha256=sha256(source),
    )
    with atomic_file(out) as temporary:
        metadata = {METADATA_KEY: header.model_dump_json()}
        safetensors.torch.save_file(loaded.weights, temporary, metadata)
        temporary.chmod(0o644)  # safetensors makes it readable for its owner only
    return loaded


def _read(path: Path) -> tuple[dict[str, Tensor], DalleHeader | None]:
    """By the file's first bytes, not by its suffix."""
    if not path.is_file():
        raise UserError(f"there is no file '{path}' with DALL-E's weights; {HOW_TO_GET_IT}.")
    with path.open("rb") as file:
        head = file.read(512)
    if head[4:9] == b"\0\0\0\0{":  # the header's length in 64 bits, then JSON
        return _read_safetensors(path)
    if head.startswith((ZIP, PICKLE)):
        return _read_pickle(path), None
    what = "neither safetensors nor a file of torch.save" if head else "empty"
    if head and all(byte >= 32 or byte in b"\t\n\r" for byte in head):
        begin = head[:40].decode(errors="replace")
        what = f"text, as a failed download or the log of one is; it begins with {begin!r}"
    raise UserError(f"the file '{path}' is {what}. {HOW_TO_GET_IT}.")


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        return read_torch_file(path)
    except RefusedError as error:
        raise UserError(
            f"the file '{path}' was refused, and nothing in it was executed: {error}. Expected is "
            "what torch.save writes of DALL-E's encoder or decoder: modules of dall_e, or a state "
            f"dict of tensors. {HOW_TO_GET_IT}."
        ) from error


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], DalleHeader | None]:
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA_KEY)
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return weights, None if text is None else DalleHeader.model_validate_json(text)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"the file '{path}' can not be read as safetensors ({error}); it holds "
            f"{path.stat().st_size:,} bytes and may be cut short. Copy it again; {HOW_TO_GET_IT}."
        ) from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(
            f"what '{path}' says about its weights is not what this version of mimkit writes "
            f"({wrong}). Convert the original again."
        ) from error
