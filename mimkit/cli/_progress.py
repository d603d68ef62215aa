"""Progress bars of commands with several stages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def bars(unit: str | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Gives what is told (stage, done, total): one bar for each stage, on stderr, gone when done.

    Args:
        unit: what is counted; None where the stages are called by that ("images").
    """
    opened: dict[str, Any] = {}

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in opened:
            for bar in opened.values():
                bar.close()
            opened[stage] = tqdm(total=total, desc=stage, unit=unit or stage.removesuffix("s"),
                                 leave=False, delay=1, disable=None)  # fmt: skip
        opened[stage].update(done - opened[stage].n)

    try:
        yield progress
    finally:
        for bar in opened.values():
            bar.close()
