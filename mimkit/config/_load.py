"""Files and overrides to a typed configuration; errors name every key that is wrong."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mimkit.config._pretraining import Config
from mimkit.config._section import Section
from mimkit.config._tokenizer import DvaeConfig, TokenizerConfig, VqkdConfig
from mimkit.config._yaml import PARTS, merge, merge_overrides, read_file, write_out
from mimkit.errors import UserError
from mimkit.registry import nearest


def _known_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(prefix + name)
        for section in _sections(field.annotation):
            keys += _known_keys(section, f"{prefix}{name}.")
    return keys


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """Of a field's type; of a union of lists, those in the lists too."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def _explain(error: ValidationError, kind: type[BaseModel], origin: str) -> str:
    lines = []
    for problem in error.errors():
        words = [word for word in problem["loc"] if isinstance(word, str)]
        key = ".".join(word for word in words if not word.startswith("<"))  # a form, see `_form`
        if problem["type"] == "extra_forbidden":
            hint = nearest(key, _known_keys(kind))
            lines.append(f"there is no setting '{key}'.{hint}")
        else:
            given = (
                ""
                if problem["type"] in ("missing", "value_error")
                else f" (given: {problem['input']!r})"
            )
            where = f"{key}: " if key else ""
            lines.append(f"{where}{problem['msg'].removeprefix('Value error, ')}{given}")
    return f"{origin}: " + "; ".join(dict.fromkeys(lines))


def _load(kind: type[Any], path: Path, overrides: Sequence[str]) -> Any:
    given = write_out(merge_overrides(overrides), " ".join(overrides))
    settings = merge(read_file(path), given)
    if kind is Config and settings.keys() & {"objective", "teacher"}:
        raise UserError(
            f"{path} is the configuration of a tokenizer's training; give it to "
            "tools/train_tokenizer.py, or give pretraining's"
        )
    for part in PARTS if kind is Config else ():  # mask_at.filler=mean is about the default part
        if isinstance(section := settings.get(part), dict):
            section.setdefault("name", Config.model_fields[part].default.name)
    if kind is TokenizerConfig:
        kind = VqkdConfig if "teacher" in settings else DvaeConfig
    origin = " ".join([str(path), *overrides])
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise UserError(_explain(error, kind, origin)) from error


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """A pretraining configuration; UserError names every key that is unknown or out of range."""
    config: Config = _load(Config, path, overrides)
    return config


def load_tokenizer_config(path: Path, overrides: Sequence[str] = ()) -> DvaeConfig | VqkdConfig:
    """The configuration of a tokenizer's training: one with a section `teacher` is a VQ-KD's."""
    config: DvaeConfig | VqkdConfig = _load(TokenizerConfig, path, overrides)
    return config
