"""The slots that runs are given: GPUs or cores."""

import os
from dataclasses import dataclass

import torch

from mimkit.errors import UserError


@dataclass(frozen=True)
class Slot:
    """Where one run at a time is trained.

    Attributes:
        devices: its GPUs, as CUDA_VISIBLE_DEVICES names them; empty on a CPU.
        ranks: processes of a run.
        threads: torch threads of a rank; None on GPUs, where the run chooses.
    """

    number: int
    devices: tuple[str, ...]
    ranks: int
    threads: int | None

    @property
    def environment(self) -> dict[str, str]:
        if not self.devices:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)}


def machine_slots(*, jobs: int, ranks: int, visible: str | None) -> list[Slot]:
    """`jobs` runs at a time, each of `ranks` ranks: a GPU for each rank, or a share of the cores.

    Args:
        visible: CUDA_VISIBLE_DEVICES, where it is set.

    Raises:
        UserError: there are fewer GPUs, or fewer cores, than that.
    """
    found = torch.cuda.device_count()
    if found:
        if jobs * ranks > found:
            raise UserError(f"--jobs {jobs} x --ranks {ranks} needs {jobs * ranks} GPUs, and "
                            f"{found} are visible; give fewer")  # fmt: skip
        names = visible.split(",") if visible else [str(number) for number in range(found)]
        return [Slot(n, tuple(names[n * ranks : (n + 1) * ranks]), ranks, None)
                for n in range(jobs)]  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    if jobs * ranks > cores:
        raise UserError(f"--jobs {jobs} x --ranks {ranks} needs {jobs * ranks} cores, and there "
                        f"are {cores}; give fewer")  # fmt: skip
    return [Slot(n, (), ranks, max(1, cores // (jobs * ranks))) for n in range(jobs)]
