"""Which weights went where: the share that was used, and every name that was not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mimkit.importing._names import renamed
from mimkit.importing.schemes import LEFT_OUT, SCHEMES, Scheme
from mimkit.weight_names import fitting, reversed_table

LEAST = 0.95  # of their encoder's weights and of ours


@dataclass(frozen=True)
class Coverage:
    """Names, each of one weight.

    Attributes:
        used: theirs -> ours.
        left_out: theirs -> why it is no part of an encoder.
        unused: theirs that nothing here knows.
        filled, unfilled: ours; the latter start as in a new encoder.
    """

    used: Mapping[str, str]
    left_out: Mapping[str, str]
    unused: Sequence[str]
    filled: Sequence[str] = ()
    unfilled: Sequence[str] = ()

    @property
    def of_theirs(self) -> float:
        """Share of their encoder's weights that found a place."""
        return len(self.used) / max(1, len(self.used) + len(self.unused))

    @property
    def of_ours(self) -> float:
        """Share of our encoder's weights that were found."""
        return len(self.filled) / max(1, len(self.filled) + len(self.unfilled))

    @property
    def share(self) -> float:
        return min(self.of_theirs, self.of_ours)


def covered(names: Sequence[str], scheme: Scheme) -> Coverage:
    """What the scheme makes of names; what it fills is known when the encoder is."""
    table, aliases = reversed_table(scheme.whole_table), scheme.aliases
    used, left_out, unused = dict[str, str](), dict[str, str](), list[str]()
    for name in names:
        if pattern := fitting(name, LEFT_OUT):
            left_out[name] = LEFT_OUT[pattern]
        elif ours := renamed(renamed(name, aliases) or name, table):
            used[name] = ours
        else:
            unused.append(name)
    return Coverage(used, left_out, unused)


def recognised(names: Sequence[str]) -> str:
    """The scheme that uses most of the names, among those whose signs are all there if any are.

    The first of equals; so the answer is the nearest one where none fits.
    """
    signed = [key for key, scheme in SCHEMES.items() if _has_signs(names, scheme)]
    return max(signed or SCHEMES, key=lambda key: len(covered(names, SCHEMES[key]).used))


def _has_signs(names: Sequence[str], scheme: Scheme) -> bool:
    known = [renamed(name, scheme.aliases) or name for name in names]
    return all(any(fitting(name, [sign]) for name in known) for sign in scheme.signs)
