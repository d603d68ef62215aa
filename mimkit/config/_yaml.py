"""YAML files with a base, and overrides `key=value`, to plain settings; no key is given twice."""

import itertools
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from mimkit.config._encoder import write_out_size
from mimkit.config._section import Settings
from mimkit.errors import UserError
from mimkit.resources import shipped_config


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            where = f"{node.start_mark.name}, line {node.start_mark.line + 1}"
            raise UserError(f"{where}: given twice: {', '.join(sorted(twice))}")
        return super().construct_mapping(node, deep)


def _parse(text: str, origin: str) -> Any:
    loader = _StrictLoader(text)
    loader.name = origin  # what messages say in front of the line
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise UserError(f"{origin} is not valid YAML: {error}") from error


def merge(old: Settings, new: Settings) -> Settings:
    """`new` over `old`, section by section; a part with another name keeps nothing of the old."""
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        merged[key] = value
        if isinstance(before, dict) and isinstance(value, dict):
            same_part = value.get("name", before.get("name")) == before.get("name")
            merged[key] = merge(before, value) if same_part else value
    return merged


def read_file(path: Path, seen: tuple[Path, ...] = ()) -> Settings:
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path} names itself as its base, by way of {seen[-1]}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"cannot read the configuration {path}: {reason}") from error
    found = _parse(text, str(path))
    if not isinstance(found, dict):
        raise UserError(f"{path} holds {type(found).__name__}, expected `key: value` lines")
    found = write_out(found, str(path))
    base = found.pop("base", None)
    return merge(read_file(_base(path, str(base)), (*seen, path)), found) if base else found


def write_out(settings: Settings, origin: str) -> Settings:
    """One file, or the command line, before it is merged: the later of a name and a depth wins."""
    encoder = settings.get("encoder")
    if not isinstance(encoder, dict):
        return settings
    try:
        return {**settings, "encoder": write_out_size(encoder)}
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error


def _base(path: Path, name: str) -> Path:
    """Beside the file that names it, or one of the shipped ones, with or without `.yaml`."""
    beside = path.parent / name
    return beside if beside.exists() else shipped_config(name) or beside


PARTS = ("mask", "mask_at", "stem", "teacher", "tokenizer")


def _override(text: str) -> Settings:
    """`train.lr=1e-3` -> {"train": {"lr": "1e-3"}}; `stem=linear` is short for stem.name=linear."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"'{text}' is not an override; write key=value, for example train.lr=1e-3")
    if key in PARTS and not value.startswith("{"):
        key += ".name"
    # a glob that begins with * would be a YAML alias
    settings: Any = value if value.startswith("*") else _parse(value, f"the value of {key}")
    for word in reversed(key.split(".")):
        settings = {word: settings}
    assert isinstance(settings, dict)
    return settings


def merge_overrides(overrides: Sequence[str]) -> Settings:
    settings: Settings = {}
    keys = [text.partition("=")[0] for text in overrides]
    for key, following in itertools.pairwise(keys):
        if key == following:  # further apart, the last one wins: a script adds to its defaults
            raise UserError(
                f"{key} is given twice in a row; give it once. A shell makes several words of "
                f"braces: quote them, '{key}=train-{{000..012}}.tar'"
            )
    for text in overrides:
        settings = _deep_update(settings, _override(text))
    return settings


def _deep_update(old: Settings, new: Settings) -> Settings:
    both = {
        k: _deep_update(old[k], v) if isinstance(v, dict) and isinstance(old.get(k), dict) else v
        for k, v in new.items()
    }
    return {**old, **both}
