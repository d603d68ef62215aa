"""`pretrain --estimate`: time, memory and disk of a run, out of a few real updates."""

import argparse
import os
from typing import TYPE_CHECKING

from mimkit.cli._arguments import command_time
from mimkit.config import Config
from mimkit.errors import UserError
from mimkit.train.stopwatch import duration

if TYPE_CHECKING:  # slow to import, and --help does not need it
    from mimkit.estimate import Estimate

_GIB = 2**30


def add_estimate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="make some real updates, say what the run would take, and stop",
    )
    parser.add_argument("--estimate-steps", type=int, default=20, metavar="N",
                        help="updates that are measured (%(default)s)")  # fmt: skip


def estimate(config: Config, *, steps: int) -> int:
    """Every rank measures; rank 0 speaks."""
    if steps < 3:
        raise UserError(f"--estimate-steps is {steps}; the first update is not counted: set 3 or "
                        "more")  # fmt: skip
    from mimkit import build
    from mimkit import estimate as estimating

    folder, peak = estimating.measure(config, steps=steps, started_at=command_time())
    if os.environ.get("RANK", "0") != "0":
        return 0
    try:
        length = build.build_data(config.data)[0].epoch_length
        whole = build.num_steps(config.train, length)
        found = estimating.estimate(config, folder, steps=whole, peak_bytes=peak)
    finally:
        estimating.remove(folder)
    print(_text(found, config))
    return 0


def _text(found: "Estimate", config: Config) -> str:
    memory = "GPU memory" if found.on_gpu else "memory, loader processes apart,"
    parts = ", ".join(f"{name} {duration(s)}" for name, s in found.parts.items() if s >= 0.5)
    return "\n".join([
        f"estimate of '{config.name}' from {found.measured_steps} updates:",
        f"  time    {duration(found.seconds)} for {found.steps} updates of {found.step:.3g} s "
        f"({found.images_per_second:.0f} images/s)",
        f"          {parts}",
        f"  memory  {found.peak_bytes / _GIB:.2f} GiB of {memory} a rank",
        f"  disk    {found.disk_bytes / _GIB:.2f} GiB; a checkpoint has "
        f"{found.checkpoint_bytes / _GIB:.3f} GiB",
        f"  images  {found.images:,} views are trained on",
    ])  # fmt: skip
