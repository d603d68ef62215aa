"""What a run's time goes into besides its updates."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by name, and how often each was measured."""

    def __init__(self) -> None:
        self._laps: dict[str, list[float]] = {}

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Adds what is inside to `name`, if it comes to its end."""
        started = time.perf_counter()
        yield
        self._laps.setdefault(name, []).append(time.perf_counter() - started)

    def numbers(self) -> dict[str, dict[str, float]]:
        """Name -> how often, and seconds in all."""
        return {
            name: {"times": len(laps), "seconds": round(sum(laps), 3)}
            for name, laps in self._laps.items()
        }


def duration(seconds: float) -> str:
    """`0.04 s`, `41 s`, `12 min`, `3.5 h`, `12 days`."""
    if 0 < seconds < 0.95:
        return f"{seconds:.1g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 100 else f"{hours / 24:.0f} days"
