"""Loader processes hand batches over in shared memory; whether there is room is asked first.

Without room a loader process dies of a "Bus error", which tells nobody what to do.
"""

import math
import shutil
from collections.abc import Callable

from mimkit.errors import UserError

_FOLDER = "/dev/shm"  # for both of torch's sharing strategies


def free_shared_memory() -> int | None:
    """Bytes; None where the system has no such folder, and no such limit."""
    try:
        return shutil.disk_usage(_FOLDER).free
    except FileNotFoundError:
        return None


def check_shared_memory(
    batch_bytes: int,
    *,
    prefetch: int,
    workers: int,
    ranks: int,
    free_bytes: Callable[[], int | None] = free_shared_memory,
) -> None:
    """Raises UserError where all the batches that are made ahead would not fit.

    Args:
        batch_bytes: of one rank's micro-batch.
        prefetch: batches that a worker has ready.
        workers: loader processes of a rank.
        ranks: that share the memory of this machine.
    """
    needed, free = batch_bytes * prefetch * workers * ranks, free_bytes()
    if free is None or needed <= free:
        return
    raise UserError(
        f"the loader processes need {_mb(needed)} of shared memory ({prefetch} batches of "
        f"{_mb(batch_bytes)} made ahead x {workers} workers x {ranks} ranks on this machine), but "
        f"{_FOLDER} has {_mb(free)} free. In a container: docker run "
        f"--shm-size={math.ceil(1.25 * needed / 1e9)}g (or --ipc=host). Else set engine.workers "
        "lower (0 needs none), or train.batch_size"
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
