"""Accidents on purpose: what a run promises to survive, tried on small real runs on this machine.

Every drill trains the embedded data by `mimkit pretrain` itself, in processes forked from this one
(which saves the seconds of importing torch and numba, nothing else), breaks something, and compares
what is left or what comes of going on with a run that nobody disturbed.
"""

import importlib
import pkgutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mimkit.drills._runs import Bench, BrokenPromiseError


@dataclass(frozen=True)
class Drill:
    """One kind of accident.

    Attributes:
        promise: what holds afterwards, in a line.
        run: raises `BrokenPromiseError` where it does not; returns what was tried.
        short: whether it belongs to the short form.
    """

    name: str
    promise: str
    run: Callable[[Bench], str]
    short: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a drill ended."""

    name: str
    promise: str
    held: bool
    seconds: float
    said: str


def all_drills() -> list[Drill]:
    """Of every module here, in the order of their names."""
    found = list[Drill]()
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        if not module.startswith("_"):
            found += importlib.import_module(f"mimkit.drills.{module}").DRILLS
    return found


def run_drills(drills: Sequence[Drill], folder: Path, *, kills: int, save_kills: int
               ) -> Iterator[Outcome]:  # fmt: skip
    """Each outcome as soon as it is there.

    Args:
        folder: an empty one for the runs.
        kills: random kills in training, each of a run of its own.
        save_kills: random kills in saving.
    """
    bench = Bench(folder, kills=kills, save_kills=save_kills)
    for drill in drills:
        started = time.perf_counter()
        try:
            held, said = True, drill.run(bench)
        except BrokenPromiseError as error:
            held, said = False, str(error)
        except Exception as error:  # a drill that fails itself has proved nothing
            held, said = False, "".join(traceback.format_exception(error)).strip()
        yield Outcome(drill.name, drill.promise, held, time.perf_counter() - started, said)
