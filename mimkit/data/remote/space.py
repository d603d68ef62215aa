"""Room in the cache: what lies there is counted, and what was needed longest ago makes room.

A shard that is read keeps its bytes although it is evicted: an open file outlives its name.
"""

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mimkit.data.remote.locks import locks_in
from mimkit.errors import UserError

GIB = 2**30
PART = ".part"
_LOCK = "space"  # held while room is made; no shard has this name
_PAUSE = 0.2  # seconds until those who fetch are looked at again


@dataclass(frozen=True)
class _Entry:
    """A shard, or the beginning of one."""

    path: Path
    size: int  # bytes that are set aside for it
    on_disk: int
    needed_at: int  # st_mtime_ns: when somebody last asked for it
    fetched_as: str | None  # of a beginning: the name of the shard, which is the name of its lock


def part_path(shard: Path, size: int) -> Path:
    """Where the first bytes of `shard` are kept while it is fetched."""
    return shard.with_name(f"{shard.name}.{size}{PART}")


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, kw_only=True)
class Space:
    """The bytes of the shards in `folder`, never more than `limit` or the disk has.

    Args:
        limit: bytes; None for no bound but the disk.
        free: bytes that the disk of a folder has left.
    """

    folder: Path
    limit: int | None
    free: Callable[[Path], int] = _free
    sleep: Callable[[float], None] = time.sleep

    def total(self) -> int:
        """Bytes that shards can ever have here. Raises OSError."""
        disk = self.free(self.folder) + sum(entry.on_disk for entry in self._entries())
        return disk if self.limit is None else min(disk, self.limit)

    def check(self, needed: int, *, why: str, fewer: str = "") -> None:
        """Raises UserError where `needed` bytes can never lie here at once; OSError.

        Args:
            fewer: how less would be needed, if it can.
        """
        if needed <= (total := self.total()):
            return
        bound = "null" if self.limit is None else f"{self.limit / GIB:.3g}"
        raise UserError(
            f"the cache of fetched shards is too small: {needed / GIB:.3g} GiB are needed {why}, "
            f"but {self.folder} has room for {total / GIB:.3g} GiB (data.cache_gib={bound}, and "
            f"what its disk has free). Set data.cache_gib={needed / GIB * 1.01:.3g} or more, or "
            f"data.cache_dir to a folder on a larger disk{fewer}."
        )

    def set_aside(self, shard: Path, size: int) -> Path:
        """Makes room for `shard` and returns the file to write it to, which counts from now on.

        Waits while all the room belongs to shards that others are fetching.

        Raises:
            UserError: the disk is full of other things.
            OSError
        """
        part = part_path(shard, size)
        while True:
            with locks_in(self.folder).hold(_LOCK):
                if self._evict(part, size):
                    part.touch()
                    return part
                part.unlink(missing_ok=True)  # or two that each have begun would wait for ever
            self.sleep(_PAUSE)

    def complete(self, part: Path, shard: Path) -> None:
        """Gives a whole `part` its name; not while somebody counts, who would see neither."""
        with locks_in(self.folder).hold(_LOCK):
            part.replace(shard)

    def _evict(self, part: Path, size: int) -> bool:
        """Whether there is room for `part` now; if not, others will have fetched theirs soon."""
        others = [entry for entry in self._entries() if entry.path != part]
        missing = size - (part.stat().st_size if part.exists() else 0)
        used = sum(entry.size for entry in others)
        free = self.free(self.folder) - sum(entry.size - entry.on_disk for entry in others)
        is_waiting = False
        for entry in sorted(others, key=lambda entry: entry.needed_at):
            if self._fits(used + size) and missing <= free:
                break
            if self._remove(entry):
                used, free = used - entry.size, free + entry.size
            else:
                is_waiting = True
        if self._fits(used + size) and missing <= free:
            return True
        if is_waiting:
            return False
        raise UserError(
            f"the disk of {self.folder} is full: {missing} bytes of a shard are to be fetched, and "
            f"{free} are free although nothing else is cached there. Free some space, or set "
            "data.cache_dir to a folder on another disk."
        )

    def _fits(self, used: int) -> bool:
        return self.limit is None or used <= self.limit

    def _remove(self, entry: _Entry) -> bool:
        """False for what is being fetched; what a killed process began is removed."""
        if entry.fetched_as is None:
            entry.path.unlink(missing_ok=True)
            return True
        with locks_in(self.folder).try_hold(entry.fetched_as) as is_free:
            if is_free:
                entry.path.unlink(missing_ok=True)
        return is_free

    def _entries(self) -> list[_Entry]:
        entries = []
        for path in [*self.folder.glob("*.tar"), *self.folder.glob(f"*.tar.[0-9]*{PART}")]:
            with contextlib.suppress(FileNotFoundError):  # it was removed or renamed since
                status, name, size = path.stat(), None, None
                if path.name.endswith(PART):
                    name, _, size = path.name.removesuffix(PART).rpartition(".")
                on_disk, needed_at = status.st_size, status.st_mtime_ns
                entries.append(_Entry(path, int(size or on_disk), on_disk, needed_at, name))
        return entries
