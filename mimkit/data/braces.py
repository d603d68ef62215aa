"""Brace patterns: `train-{000..012}.tar` stands for thirteen names."""

import re
from itertools import islice

import braceexpand

from mimkit.errors import UserError

_MOST = 1_000_000  # names of one pattern
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")  # is made whole before its first name comes


def expand_braces(pattern: str) -> list[str]:
    """The names that `pattern` stands for. Raises UserError for braces that do not match."""
    names, longest = [], max((abs(int(b) - int(a)) for a, b in _RANGE.findall(pattern)), default=0)
    if longest < _MOST:
        try:
            names = list(islice(braceexpand.braceexpand(pattern, escape=False), _MOST + 1))
        except ValueError as error:
            raise UserError(f"the braces of '{pattern}' do not match.") from error
    if not 0 < len(names) <= _MOST:
        raise UserError(f"'{pattern}' stands for more than {_MOST} names; check its braces.")
    return names
