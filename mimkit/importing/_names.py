"""Patterns of weight names: each {} stands for one or more parts of a name."""

import re
from collections.abc import Iterable, Mapping


def renamed(name: str, table: Mapping[str, str]) -> str | None:
    """The name that the first fitting pattern gives it; None where none fits."""
    for old, new in table.items():
        if found := _match(name, old):
            return new.format(*found.groups())
    return None


def reversed_table(table: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in table.items()}


def fitting(name: str, patterns: Iterable[str]) -> str | None:
    """The first of the patterns that fits the name."""
    return next((pattern for pattern in patterns if _match(name, pattern)), None)


def some(names: Iterable[str], *, limit: int = 12) -> str:
    """A list for a message: not endless, and it says how many are left."""
    every = list(names)
    shown = ", ".join(every[:limit])
    return shown if len(every) <= limit else f"{shown} and {len(every) - limit} more"


def _match(name: str, pattern: str) -> re.Match[str] | None:
    return re.fullmatch(re.escape(pattern).replace(r"\{\}", "(.+)"), name)
