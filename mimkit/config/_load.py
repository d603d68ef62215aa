"""Files and overrides to a typed configuration; errors name every key that is wrong."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mimkit.config._finetuning import FinetuneConfig
from mimkit.config._pretraining import Config
from mimkit.config._section import Section, Settings
from mimkit.config._study import StudyConfig
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
    return f"{'; '.join(dict.fromkeys(lines))} ({origin})"


def _load(
    kind: type[Any], path: Path, overrides: Sequence[str], layers: Sequence[Settings] = ()
) -> Any:
    settings = read_file(path)
    for layer in layers:
        settings = merge(settings, write_out(layer, str(layer)))
    settings = merge(settings, write_out(merge_overrides(overrides), " ".join(overrides)))
    if kind is Config and settings.keys() & {"objective", "teacher"}:
        raise UserError(
            f"{path} is the configuration of a tokenizer's training; give it to "
            "tools/train_tokenizer.py, or give pretraining's"
        )
    for part in PARTS if kind is Config else ():  # mask_at.filler=mean is about the default part
        if isinstance(section := settings.get(part), dict):
            section.setdefault("name", Config.model_fields[part].default.name)
    if kind is FinetuneConfig and settings.get("stem") == {"name": None}:  # stem=null
        settings["stem"] = None
    if kind is TokenizerConfig:
        kind = VqkdConfig if "teacher" in settings else DvaeConfig
    number = len(overrides)
    origin = f"in {path}" + (f" and {number} setting{'s' * (number > 1)} over it" if number else "")
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise UserError(_explain(error, kind, origin)) from error


def load_config(
    path: Path, overrides: Sequence[str] = (), *, layers: Sequence[Settings] = ()
) -> Config:
    """A pretraining configuration; UserError names every key that is unknown or out of range.

    Args:
        layers: settings over the file's, later ones over earlier ones; a study's.
    """
    config: Config = _load(Config, path, overrides, layers)
    return config


def load_tokenizer_config(path: Path, overrides: Sequence[str] = ()) -> DvaeConfig | VqkdConfig:
    """The configuration of a tokenizer's training: one with a section `teacher` is a VQ-KD's."""
    config: DvaeConfig | VqkdConfig = _load(TokenizerConfig, path, overrides)
    return config


def load_finetune_config(
    path: Path, overrides: Sequence[str] = (), *, layers: Sequence[Settings] = ()
) -> FinetuneConfig:
    """The configuration of a finetuning; errors and `layers` as in `load_config`."""
    config: FinetuneConfig = _load(FinetuneConfig, path, overrides, layers)
    return config


def load_study_config(path: Path, overrides: Sequence[str] = ()) -> StudyConfig:
    """The configuration of a study; errors as in `load_config`. Its arms are not read here."""
    study: StudyConfig = _load(StudyConfig, path, overrides)
    return study


def recipe(path: Path) -> Settings:
    """The section `train` as a file and its bases have it, before any override."""
    train: Settings = read_file(path).get("train") or {}
    return train
