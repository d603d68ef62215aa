"""Names of classes as files give them: strings, or pairs of an id and a name."""

import ast
from collections.abc import Iterable

EXPECTED = (
    "the names of the labels 0, 1, ..., as a list of strings or of [id, name] pairs; "
    '{"0": name, ...} and {name: 0, ...} are taken too'
)


def class_names(found: object) -> list[str]:
    """Out of parsed JSON; a pair becomes "id name".

    Raises:
        ValueError: it is something else, or does not number the names 0, 1, ... without gaps.
    """
    if isinstance(found, dict):
        found = _in_order(found)
    if not isinstance(found, list):
        raise ValueError(f"it holds one {type(found).__name__}")
    if not found:
        raise ValueError("it is empty")
    return [_name(entry, number) for number, entry in enumerate(found)]


def names_on_record(names: Iterable[str]) -> tuple[str, ...]:
    """Out of a file of ours; in older ones a pair is what Python prints of a list."""
    return tuple(_without_brackets(name) for name in names)


def _in_order(found: dict[str, object]) -> list[object]:
    """Of {"0": name}, or of {name: 0}: names are no integers, so one is never the other."""
    by_number: dict[object, object] = {
        number: name for name, number in found.items() if type(number) is int
    }
    if len(by_number) < len(found):
        by_number = {int(key) if key.isdecimal() else key: name for key, name in found.items()}
    if set(by_number) != set(range(len(found))):
        raise ValueError(f"its {len(found)} names are not numbered 0..{len(found) - 1}, each once")
    return [by_number[number] for number in range(len(found))]


def _name(entry: object, number: int) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list) and len(entry) == 2 and all(isinstance(e, str) for e in entry):
        return " ".join(entry)
    text = repr(entry)
    raise ValueError(f"entry {number} is {text if len(text) <= 60 else text[:57] + '...'}")


def _without_brackets(name: str) -> str:
    if not (name.startswith("[") and name.endswith("]")):
        return name
    try:
        return _name(ast.literal_eval(name), 0)
    except (ValueError, SyntaxError):
        return name
