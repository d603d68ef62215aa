"""The encoder, and its short names: S36, B18x2."""

import re
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from mimkit.config._section import Section, Settings
from mimkit.errors import UserError

SizeName = Literal["Ti", "S", "B", "L", "H"]
_SIZE = re.compile(rf"({'|'.join(get_args(SizeName))})(?:([1-9][0-9]*)(?:x([1-9][0-9]*))?)?")


class ArchitectureConfig(Section):
    """`size: B18x2` is short for size B, depth 18, branches 2; S36 for one branch (P, section 3).

    In whichever file or on the command line it stands, a name means the same as the three written
    out there: it replaces a base's depth and branches, and what comes later replaces its own. A
    bare letter says nothing about depth and branches.
    """

    size: SizeName = "B"
    depth: int | None = Field(None, ge=1)  # None: the size's own
    patch_size: int = Field(16, ge=1)
    positions: Literal["absolute", "relative", "relative_shared", "none"] = "absolute"
    layer_scale: float | None = 0.1  # BEiT: 0.1 for B, 1e-5 for L; None is without
    qkv_bias: Literal["qv", "qkv"] = "qv"  # BEiT has no key bias
    branches: int = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, settings: Any) -> Any:
        return write_out_size(settings) if isinstance(settings, dict) else settings


class EncoderConfig(ArchitectureConfig):
    """And what only its training has."""

    drop_path: float = Field(0.1, ge=0, lt=1)


def write_out_size(encoder: Settings) -> Settings:
    name = encoder.get("size")
    if not isinstance(name, str):
        return encoder
    found = _SIZE.fullmatch(name)
    if found is None:
        raise UserError(
            f"encoder.size is '{name}'; expected one of {', '.join(get_args(SizeName))}, alone or "
            "with a depth (S36), or with a depth and branches (B18x2: 18 blocks of 2 branches)"
        )
    letter, depth, branches = found.groups()
    if depth is None:
        return encoder
    named = {"depth": int(depth), "branches": int(branches or 1)}
    for key, value in named.items():
        if encoder.get(key) not in (None, value):
            raise UserError(
                f"encoder.size={name} means encoder.{key}={value}, but encoder.{key} is "
                f"{encoder[key]}; leave encoder.{key} out, or set encoder.size={letter}"
            )
    return {**encoder, "size": letter, **named}
