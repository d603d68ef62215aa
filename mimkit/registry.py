"""A part's name is its file's name; the file is imported when the part is first asked for."""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from mimkit.errors import UserError

Part = TypeVar("Part", bound=Callable[..., object])


def nearest(name: str, known: list[str]) -> str:
    """A hint for a misspelling: the known name closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


class Registry(Generic[Part]):
    """The parts of one kind: one folder, one file a part, no list to edit.

    Args:
        kind: what a part is called in messages, for example "stem".
        package: dotted name of the folder that holds the files.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._parts: dict[str, Part] = {}

    def register(self, part: Part) -> Part:
        """Decorator: the part takes the name of the file it stands in; one part a file."""
        name = part.__module__.rpartition(".")[2]
        if name in self._parts:
            raise ValueError(f"{self.kind} '{name}': {part.__module__} registers two parts")
        self._parts[name] = part
        return part

    def names(self) -> list[str]:
        """Every part there is, sorted, without importing any."""
        path = importlib.import_module(self.package).__path__
        return sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))

    def __getitem__(self, name: str) -> Part:
        if name not in self._parts:
            known = self.names()
            if name not in known:
                raise UserError(
                    f"there is no {self.kind} called '{name}'.{nearest(name, known)} "
                    f"Known: {', '.join(known)}."
                )
            importlib.import_module(f"{self.package}.{name}")
            if name not in self._parts:
                raise ValueError(f"{self.package}.{name} registers no {self.kind}")
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self.names()
