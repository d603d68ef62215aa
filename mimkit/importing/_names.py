"""Names of weights, as import reads them and as messages list them."""

from collections.abc import Iterable

from mimkit.weight_names import Table, new_names


def renamed(name: str, table: Table) -> str | None:
    """The name that the first fitting pattern gives it; None where none fits."""
    return next(iter(new_names(name, table)), None)


def some(names: Iterable[str], *, limit: int = 12) -> str:
    """A list for a message: not endless, and it says how many are left."""
    every = list(names)
    shown = ", ".join(every[:limit])
    return shown if len(every) <= limit else f"{shown} and {len(every) - limit} more"
