"""What a job has taken, all of its attempts together: seconds, processor time, memory."""

import json
import resource
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from mimkit.files import write_text


@dataclass(frozen=True)
class Spent:
    """
    Attributes:
        wall: seconds.
        process: seconds of processor time, loader processes included.
        memory_mib: most that was resident, the job and its largest loader process together.
        attempts: a job that was interrupted and gone on with has several.
        unmeasured: of those, that were killed: their processor time and memory are not known.
    """

    wall: float = 0.0
    process: float = 0.0
    memory_mib: float = 0.0
    attempts: int = 0
    unmeasured: int = 0

    def and_this_process(self, wall: float) -> "Spent":
        """One attempt more: this process, which took so many seconds."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return together([self, Spent(
            wall, sum(one.ru_utime + one.ru_stime for one in used),
            sum(one.ru_maxrss for one in used) / 1024, attempts=1,
        )])  # fmt: skip

    def and_killed(self, wall: float) -> "Spent":
        """One attempt more, of which only its seconds are known."""
        return together([self, Spent(wall, attempts=1, unmeasured=1)])


def together(parts: Iterable[Spent]) -> Spent:
    """Sums, and the most memory."""
    parts = list(parts)
    return Spent(
        sum(one.wall for one in parts),
        sum(one.process for one in parts),
        max((one.memory_mib for one in parts), default=0.0),
        sum(one.attempts for one in parts),
        sum(one.unmeasured for one in parts),
    )


def write_spent(file: Path, error: str | None, spent: Spent) -> None:
    """
    Args:
        error: of the last attempt, None where it ended well.
    """
    write_text(file, json.dumps({"error": error, **asdict(spent)}))


def read_spent(file: Path) -> tuple[str | None, Spent]:
    """The last attempt's error, and all that was spent; nothing where there is no file."""
    if not file.exists():
        return None, Spent()
    found = json.loads(file.read_text(encoding="utf-8"))
    error = found.pop("error")
    return error, Spent(**{"attempts": 1, **found})
