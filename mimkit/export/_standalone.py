"""One self-contained Python file out of mimkit's own sources, for processes without mimkit.

A definition is taken with everything of ours that it refers to, and nothing else, so the file can
not drift from the code it is made of. What belongs to the registry is left out: decorators that
register, and methods that ask it for a name.
"""

import ast
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_REGISTRY = "STEMS"


@dataclass
class _Source:
    """The top level of one source file."""

    lines: list[str]
    defined: dict[str, ast.stmt] = field(default_factory=dict)
    ours: dict[str, str] = field(default_factory=dict)  # name -> the module of mimkit it is from
    external: dict[str, str] = field(default_factory=dict)  # name -> the module it is from
    taken: set[str] = field(default_factory=set)

    def names(self) -> set[str]:
        """Of this module, what the taken definitions refer to."""
        return {name for taken in self.taken for name in _references(self.defined[taken])}


def standalone(*parts: Any, header: str, more_imports: str = "") -> str:
    """Source text of classes and functions with what they need.

    Args:
        header: its docstring.
        more_imports: lines for code that the caller puts behind it.
    """
    sources: dict[str, _Source] = {}
    for part in parts:
        _take(part.__module__, part.__name__, sources)
    _check_names(sources)
    ordered = [sources[dotted] for dotted in _in_order(sources)]
    bodies = [text for source in ordered for text in _texts(source)]
    return "\n\n\n".join([f'"""{header}"""\n\n{_imports(ordered)}{more_imports}', *bodies]) + "\n"


def _take(dotted: str, name: str, sources: dict[str, _Source]) -> None:
    """Marks a definition, and all of ours that it refers to."""
    source = sources[dotted] if dotted in sources else sources.setdefault(dotted, _read(dotted))
    if name in source.taken:
        return
    source.taken.add(name)
    for used in _references(source.defined[name]):
        if used in source.ours:
            _take(source.ours[used], used, sources)
        elif used in source.defined:
            _take(dotted, used, sources)


def _read(dotted: str) -> _Source:
    module = sys.modules.get(dotted) or importlib.import_module(dotted)
    text = inspect.getsource(module)
    source = _Source(text.splitlines())
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            source.external |= {alias.asname or alias.name: _import(alias) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            inside = source.ours if node.module.startswith("mimkit") else source.external
            for alias in node.names:
                assert alias.asname is None, f"{dotted} renames what it imports"
                inside[alias.name] = node.module
        else:
            source.defined |= dict.fromkeys(_defines(node), node)
    return source


def _import(alias: ast.alias) -> str:
    return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _references(node: ast.AST) -> Iterator[str]:
    """Names in a definition, without the members that are left out."""
    for child in ast.iter_child_nodes(node):
        if not _left_out(child):
            if isinstance(child, ast.Name):
                yield child.id
            yield from _references(child)


def _left_out(node: ast.AST) -> bool:
    """A decorator that registers, or a method that speaks to the registry."""
    parts = ast.walk(node) if isinstance(node, ast.FunctionDef | ast.Attribute) else ()
    return any(isinstance(part, ast.Name) and part.id == _REGISTRY for part in parts)


def _check_names(sources: dict[str, _Source]) -> None:
    owners = defaultdict(set)
    for dotted, source in sources.items():
        for name in source.taken:
            owners[name].add(dotted)
        for name in source.names() & source.external.keys():
            owners[name].add(source.external[name])
    doubles = {name: sorted(where) for name, where in owners.items() if len(where) > 1}
    assert not doubles, f"one file cannot hold two things of one name: {doubles}; rename one"


def _in_order(sources: dict[str, _Source]) -> list[str]:
    """Modules, each behind those it needs when it is read."""
    ordered: dict[str, None] = {}

    def visit(dotted: str) -> None:
        source = sources[dotted]
        needed = {source.ours[name] for name in source.names() & source.ours.keys()}
        for other in sorted(needed - ordered.keys()):
            visit(other)
        ordered[dotted] = None

    for dotted in sorted(sources):
        if dotted not in ordered:
            visit(dotted)
    return list(ordered)


def _imports(sources: list[_Source]) -> str:
    plain, of_module = set(), defaultdict(set)
    for source in sources:
        for name in source.names() & source.external.keys():
            module = source.external[name]
            if module in (name, f"{module.split(' as ')[0]} as {name}"):
                plain.add(f"import {module}")
            else:
                of_module[module].add(name)
    lines = [f"from {module} import {', '.join(sorted(of_module[module]))}" for module in of_module]
    return "\n".join([*sorted(plain), *sorted(lines)])


def _texts(source: _Source) -> Iterator[str]:
    """The taken definitions as they stand in the file, comments above them included."""
    nodes = {id(node): node for name, node in source.defined.items() if name in source.taken}
    for node in sorted(nodes.values(), key=lambda node: node.lineno):
        members = [node, *getattr(node, "body", []), *getattr(node, "decorator_list", [])]
        dropped = {line for part in members if _left_out(part) for line in _span(part)}
        kept = [source.lines[line - 1] for line in _span(node) if line not in dropped]
        yield "\n".join([*_comment(source, node), *kept])


def _span(node: ast.AST) -> range:
    """Line numbers of a node, its decorators included."""
    starts = [part.lineno for part in (node, *getattr(node, "decorator_list", []))]  # type: ignore[attr-defined]
    return range(min(starts), node.end_lineno + 1)  # type: ignore[attr-defined]


def _comment(source: _Source, node: ast.AST) -> list[str]:
    above = _span(node).start - 2
    first = above
    while first >= 0 and source.lines[first].startswith("#"):
        first -= 1
    return source.lines[first + 1 : above + 1]
