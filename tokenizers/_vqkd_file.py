"""The file a VQ-KD lies in: safetensors with its sizes and history as JSON. Never a pickle."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mimkit.errors import UserError
from mimkit.files import atomic_file
from mimkit.tokenizers._network_file import drawn_from, fill, read_weights
from mimkit.tokenizers._vqkd_model import Vqkd

METADATA_KEY = "mimkit.vqkd"
HOW_TO_MAKE_ONE = "`tools/train_tokenizer.py --config vqkd` makes one"


class VqkdSettings(BaseModel):
    """What a file says about the VQ-KD in it; everything but `training` decides the tokens."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal[1] = 1
    width: int = Field(ge=1, le=8192)
    heads: int = Field(ge=1, le=256)
    depth: int = Field(ge=1, le=256)
    patch_size: int = Field(ge=1, le=1024)
    image_size: int = Field(ge=1, le=8192)
    vocabulary: int = Field(ge=2, le=2**20)
    code_dim: int = Field(ge=1, le=8192)
    pixel_mapping: Literal["2 * x - 1"] = "2 * x - 1"
    training: dict[str, Any] = Field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """What the network is built of."""
        return self.model_dump(exclude={"format", "pixel_mapping", "training"})


def save_vqkd(path: Path, vqkd: Vqkd, settings: VqkdSettings) -> None:
    """Writes the file in fp32, wholly or not at all."""
    weights = {name: w.detach().cpu().contiguous() for name, w in vqkd.state_dict().items()}
    with atomic_file(path) as temporary:
        safetensors.torch.save_file(weights, temporary, {METADATA_KEY: settings.model_dump_json()})
        temporary.chmod(0o644)  # safetensors makes it readable for its owner only


def load_vqkd(path: Path) -> tuple[Vqkd, VqkdSettings]:
    """The VQ-KD in fp32 on the CPU, and what its file says about it.

    Raises:
        UserError: the file is missing, text, a pickle, cut short, or holds something else.
    """
    metadata, weights = read_weights(path, what="a VQ-KD tokenizer", remedy=HOW_TO_MAKE_ONE)
    settings = _settings(path, metadata)
    with drawn_from(0):
        vqkd = Vqkd(**settings.sizes)
    fill(vqkd, weights, path=str(path), remedy=HOW_TO_MAKE_ONE)
    return vqkd, settings


def _settings(path: Path, metadata: Mapping[str, str]) -> VqkdSettings:
    if METADATA_KEY not in metadata:
        raise UserError(
            f"the file '{path}' holds something else than a VQ-KD tokenizer: it lacks the entry "
            f"'{METADATA_KEY}' in its metadata. {HOW_TO_MAKE_ONE}."
        )
    try:
        return VqkdSettings.model_validate_json(metadata[METADATA_KEY])
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(
            f"the settings in '{path}' are not those of a VQ-KD of this version of mimkit "
            f"({wrong}). {HOW_TO_MAKE_ONE}."
        ) from error
