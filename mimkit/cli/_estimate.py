"""`pretrain --estimate`, `finetune --estimate`: time, memory and disk of a run, out of a few real
updates."""

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from mimkit.cli._arguments import command_time
from mimkit.config import Config, FinetuneConfig
from mimkit.errors import UserError
from mimkit.train.stopwatch import duration

if TYPE_CHECKING:  # slow to import, and --help does not need it
    from mimkit.estimate import Estimate
    from mimkit.runs import RunFolder

_MIB, _GIB = 2**20, 2**30


def add_estimate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="make some real updates, say what the run would take, and stop",
    )
    parser.add_argument("--estimate-steps", type=int, default=20, metavar="N",
                        help="updates that are measured (%(default)s)")  # fmt: skip


def check_estimate(arguments: argparse.Namespace) -> None:
    """UserError for too few updates."""
    if arguments.estimate and arguments.estimate_steps < 3:
        raise UserError(f"--estimate-steps is {arguments.estimate_steps}; the first update is not "
                        "counted: set 3 or more")  # fmt: skip


def estimate(
    config: Config | FinetuneConfig, run: "Callable[..., RunFolder]", *, steps: int
) -> int:
    """Every rank measures by `run`; rank 0 speaks."""
    from mimkit import build
    from mimkit import estimate as estimating

    folder = estimating.measure(config, run, steps=steps, started_at=command_time())
    if os.environ.get("RANK", "0") != "0":
        return 0
    try:
        train, heldout = build.build_data(config.data)
        length = estimating.Length(
            steps=build.num_steps(config.train, train.epoch_length), train=len(train),
            judged=len(heldout or train),
        )  # fmt: skip
        found = estimating.estimate(config, folder, length)
    finally:
        estimating.remove(folder)
    print(_text(found, config))
    return 0


def _text(found: "Estimate", config: Config | FinetuneConfig) -> str:
    memory = "GPU memory" if found.on_gpu else "memory, loader processes apart,"
    parts = ", ".join(f"{name} {duration(s)}" for name, s in found.parts.items() if s >= 0.5)
    predicted = f", of which {found.predicted:,} are predicted" if found.predicted else ""
    return "\n".join([
        f"estimate of '{config.name}' from {found.measured_steps} updates:",
        f"  time    {duration(found.seconds)} for {found.steps} updates of {found.step:.3g} s "
        f"({found.images_per_second:.0f} images/s)",
        f"          {parts}",
        f"  memory  {_bytes(found.peak_bytes)} of {memory} a rank",
        f"  disk    {_bytes(found.disk_bytes)}; a checkpoint has {_bytes(found.checkpoint_bytes)}",
        f"  tokens  {found.images:,} views of {found.patches // found.images} patches: "
        f"{found.patches:,}{predicted}",
    ])  # fmt: skip


def _bytes(number: int) -> str:
    return f"{number / _MIB:.1f} MiB" if number < _GIB else f"{number / _GIB:.2f} GiB"
