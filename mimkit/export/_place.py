"""Where an export goes: nothing is replaced unasked, and a folder only if it is an export."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from mimkit.errors import UserError
from mimkit.files import atomic_file, atomic_folder

_CARD_MARK = b"written by mimkit"  # stands in every card
_MADE = frozenset({"README.md", "config.json", "model.safetensors", "modeling_mimkit.py",
                   "preprocessor_config.json"})  # fmt: skip


def card_path(path: Path) -> Path:
    """Where the card of a file lies: beside it."""
    return path.with_name(f"{path.name}.md")


def is_card(path: Path) -> bool:
    """Whether it is a model card of mimkit's."""
    return path.is_file() and _CARD_MARK in path.read_bytes()


def check_file(path: Path, *, overwrite: bool, has_card: bool) -> None:
    """UserError where something is in the way of a file, before any work."""
    if path.is_dir():
        raise UserError(f"{path} is a folder, and this format writes a file; name another")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists; --overwrite replaces it, or name another file")
    note = card_path(path)
    if has_card and note.exists() and not is_card(note):
        raise UserError(
            f"{note} is no model card of mimkit's, and the card would replace it; move it, or name "
            "another file"
        )


def check_folder(path: Path, *, overwrite: bool) -> None:
    """The same of a folder; one that is no export is not even removed with `overwrite`."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file, and this format writes a whole folder; name another")
    if not overwrite:
        raise UserError(
            f"{path} exists, and this format writes a whole folder; --overwrite replaces it, or "
            "name another"
        )
    strange = sorted({file.name for file in path.iterdir()} - _MADE)
    if strange or not is_card(path / "README.md"):
        found = f"it has {', '.join(strange[:4])}" if strange else "its README.md is no card of one"
        raise UserError(
            f"{path} is not only an export of mimkit's ({found}), so --overwrite does not remove "
            "it; do that yourself, or name another folder"
        )


def check_texts(folder: Path, texts: Mapping[str, str], *, overwrite: bool) -> None:
    """UserError for text files beside an export that are there with another content."""
    for name, text in texts.items():
        path = folder / name
        if not overwrite and path.exists() and path.read_bytes() != text.encode():
            raise UserError(
                f"{path} exists and is another one than this export needs beside it; --overwrite "
                "replaces it, or name another folder"
            )


@contextlib.contextmanager
def placed(path: Path, *, is_folder: bool) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when it is complete."""
    if not is_folder:
        with atomic_file(path) as temporary:
            yield temporary
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
    try:
        with atomic_folder(path) as temporary:
            yield temporary
            if path.exists():
                path.rename(aside)
    finally:
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
        elif aside.exists():
            aside.rename(path)
