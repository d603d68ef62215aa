"""A part's name is its file's name; the file is imported when the part is first asked for.

A part of the user's own, outside the package, is named by where its code is: `mine.py:Mine`. What
that code says decides numbers, so that it has a digest.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Generic, TypeVar, cast, get_type_hints

from mimkit.errors import UserError, last_line_in

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
        self._code: dict[str, str | None] = {}  # of parts that were plugged in

    def register(self, part: Part) -> Part:
        """Decorator: the part takes the name of the file it stands in; one part a file.

        On a part outside the folder it does nothing: that one can not take the name of one of ours.
        """
        folder, _, name = part.__module__.rpartition(".")
        if folder != self.package:
            return part
        if name in self._parts:
            raise ValueError(f"{self.kind} '{name}': {part.__module__} registers two parts")
        self._parts[name] = part
        return part

    def plug_in(self, name: str) -> Part:
        """The part of this name, which may be code of the user's own.

        `mine.py:Mine` is what is called `Mine` in that file, `package.module:Mine` in a module that
        Python can import: a class that derives from the contract of this kind, or a function that
        says it returns one. For names that a person wrote: it runs that code. `registry[name]` is
        for names out of files; it knows a user's part only after this.

        Raises:
            UserError: there is no such part, file or module, nothing of that name in it, or
                something else.
        """
        if ":" in name and name not in self._parts:
            part, self._code[name] = _users_own(name, self.kind)
            if not _derives(part, self.package):
                raise UserError(
                    f"{self.kind} '{name}' is no {self.kind}: expected a class that derives from "
                    f"the contract in {self.package}, or a function with such a class as its "
                    "return annotation"
                )
            self._parts[name] = cast(Part, part)
        return self[name]

    def code_digest(self, name: str) -> str | None:
        """Of a part of the user's own, see the function `code_digest`; None for one of ours."""
        self.plug_in(name)
        return self._code.get(name)

    def name_of(self, part: object) -> str:
        """What a registered part is called; the name of its module if it is not registered."""
        for name, known in self._parts.items():
            if known is part:
                return name
        return str(getattr(part, "__module__", "")).rpartition(".")[2]

    def names(self) -> list[str]:
        """Every part there is, sorted, without importing any."""
        path = importlib.import_module(self.package).__path__
        return sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))

    def __getitem__(self, name: str) -> Part:
        if name not in self._parts:
            known = self.names()
            if ":" in name:
                raise UserError(
                    f"the {self.kind} '{name}' is no part of mimkit but code of a user's own, "
                    "which a file can not start. If you trust that code, name it yourself first: a "
                    f"configuration with {self.kind}.name={name}, or plug_in('{name}') of the "
                    "registry"
                )
            if name.endswith(".py"):
                raise UserError(
                    f"{self.kind} '{name}' names a file and no class in it; write {name}:NAME"
                )
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


@cache
def code_digest(module: ModuleType) -> str | None:
    """SHA-256 of a user's own code as this process loaded it, 12 digits; None for mimkit's modules.

    Of the module's file, and of the files in the same folder that it imports, and those that they
    import from there.
    """
    if module.__name__.partition(".")[0] == "mimkit":
        return None
    home, files, todo = _file(module).parent, dict[Path, str](), [module]
    while todo:
        one = todo.pop()
        path = _file(one)
        if path.is_file() and path.parent == home and path not in files:
            files[path] = hashlib.sha256(path.read_bytes()).hexdigest()
            todo += _imported(one)
    text = "".join(f"{path.name} {files[path]}\n" for path in sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _file(module: ModuleType) -> Path:
    """Its source; what is no file for a module without one."""
    return Path(getattr(module, "__file__", None) or "")


def _imported(module: ModuleType) -> Iterator[ModuleType]:
    """Modules that it has names of, or from."""
    for value in list(vars(module).values()):
        name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        if isinstance(name, str) and name in sys.modules:
            yield sys.modules[name]


def _users_own(name: str, kind: str) -> tuple[object, str | None]:
    """What `FILE.py:NAME` or `MODULE:NAME` stands for, and the digest of its code."""
    where, _, attribute = name.rpartition(":")
    module = _file_module(Path(where), name) if where.endswith(".py") else _module(where, name)
    found = getattr(module, attribute, None)
    if not callable(found):
        origin = {n: getattr(v, "__module__", None) for n, v in vars(module).items()}
        its = [n for n in origin if origin[n] == module.__name__]
        raise UserError(
            f"{kind} '{name}': there is no class or function '{attribute}' in '{where}'."
            f"{nearest(attribute, its)} It has: {', '.join(its) or 'none'}"
        )
    return found, code_digest(module)


def _derives(part: object, package: str) -> bool:
    """Whether a class, or what a function says it returns, has a base of this very module.

    So that no configuration calls what just happens to be importable, as `os:system` is.
    """
    made = get_type_hints(part).get("return") if inspect.isfunction(part) else part
    return inspect.isclass(made) and any(base.__module__ == package for base in made.__mro__)


def _module(dotted: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{dotted}.".startswith(f"{error.name}."):
            raise  # their module is there, and misses another
        raise UserError(
            f"'{name}': Python finds no module '{dotted}'; install it, put its folder into "
            "PYTHONPATH, or name a file: path/to/mine.py:Mine"
        ) from error
    except (TypeError, ValueError) as error:  # an empty name, or a relative one
        raise UserError(
            f"'{name}' names no module before the colon; write path/to/mine.py:Mine or "
            "package.module:Mine"
        ) from error


class _Source(SourceFileLoader):
    """Always of the file itself: Python takes a cached compilation for it that is a second older,
    if the file is as long as before."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _line(error: Exception, path: Path) -> str:
    """What went wrong in a user's file, and in which line of it."""
    number = last_line_in(error, str(path))
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{path}, line {number}: {type(error).__name__}: {said}"


def _file_module(path: Path, name: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(
            f"'{name}': there is no file '{path}'; a relative path starts at the folder in which "
            "the command is given"
        )
    # Not its bare name: `random.py` would hide Python's own.
    alias = f"mimkit_plugged_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.{path.stem}"
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, path, loader=_Source(alias, str(path)))
        assert spec is not None and spec.loader is not None
        module = sys.modules[alias] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[alias]
            if not isinstance(error, Exception) or isinstance(error, UserError):
                raise
            raise UserError(f"'{name}' cannot be imported: {_line(error, path)}") from error
    return sys.modules[alias]
