"""Memory of a step: what is kept for backward, and the peak."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from mimkit.models.saved import SavedForBackward


def saved_mib(
    forward: Callable[[int], Tensor], model: nn.Module, *, batches: tuple[int, int] = (2, 4)
) -> float:
    """MiB an image that autograd keeps for backward: the slope between two batch sizes.

    Not from a batch of one, where layouts differ and less is copied. What does not grow with the
    batch (autocast's copies of weights) is no part of it. It is counted, so load changes nothing.
    """
    few, many = batches
    counts = [_saved(forward, model, size) for size in (few, many)]
    return (counts[1] - counts[0]) / (many - few) / 2**20


def _saved(forward: Callable[[int], Tensor], model: nn.Module, size: int) -> int:
    with SavedForBackward(model) as saved:
        kept = forward(size)
    del kept
    return saved.num_bytes


def peak_mib(work: Callable[[], object], *, device: torch.device) -> float | None:
    """The most memory that `work` took beyond what was taken before; None where nobody counts.

    On a CPU it is of the whole process (Linux), to some MiB.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return float(torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # peak := now
        before_kib = _status("VmRSS")
        work()
        return max(0.0, (_status("VmHWM") - before_kib) / 2**10)
    except (OSError, AttributeError):
        return None


def _status(key: str) -> int:
    """A number of kB that Linux tells about this process."""
    found = re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise OSError(f"/proc/self/status has no {key}")
    return int(found[1])
