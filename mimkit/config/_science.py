"""What decides the numbers of a run, its hash, and where two configurations differ."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from mimkit.config._section import Settings


def to_yaml(config: BaseModel) -> str:
    """The resolved configuration as YAML that loads back to the same."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def science_of(config: BaseModel) -> Settings:
    """What decides the numbers: all but `output` and `engine` (whose precision stays).

    Nor where files are cached, nor what stops a run that went wrong (bad samples, gradients that
    are not finite): it goes on when more is allowed.
    """
    settings = config.model_dump(mode="json")
    settings.pop("output")
    settings["engine"] = {"precision": settings["engine"]["precision"]}
    for key in ("cache_dir", "cache_gib", "max_bad_samples"):
        settings["data"].pop(key)
    for key in ("on_nonfinite", "max_nonfinite"):
        settings["train"].pop(key)
    for key in ("view_seed", "heldout_limit"):  # newer than some runs, which go on being theirs
        if settings["data"].get(key, 0) is None:
            settings["data"].pop(key)
    return settings


def science_hash(config: BaseModel) -> str:
    return hashlib.sha256(json.dumps(science_of(config), sort_keys=True).encode()).hexdigest()[:16]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for every leaf that differs."""
    lines: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return lines
