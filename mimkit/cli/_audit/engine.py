"""`mimkit audit engine`: do ZeRO, ranks and the DeepSpeed JSON change what is learnt?"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mimkit.cli._arguments import check_range, find_config, output_file
from mimkit.cli._folder import Subparsers

if TYPE_CHECKING:  # slow to import, and --help does not need them
    from mimkit.audit.engine import Parity
    from mimkit.config import Config

_PATIENCE = 1800.0  # seconds for each of the two
_SHOWN = 5  # tensors
_EPILOG = """
Give the configuration and the settings that the long job will have, engine.deepspeed_config too.
Both trainings are whole ones in a temporary folder: nothing is written among your runs. The global
batch is made small (--batch), and batch sizes in the JSON are left out for it; the learning rate
rises to train.lr in the first half of the steps and falls again.

exit code: 0 equal within the tolerance, 1 not equal, 2 it could not be measured

examples:
  tools/audit.py engine engine.zero_stage=2 --ranks 2
  tools/audit.py engine --config beit_base_hmlp data.train=shards/train data.heldout=null \\
      engine.deepspeed_config=my.json engine.accumulation=2 --ranks 8 --json engine.json
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "engine",
        help="ten steps by plain PyTorch and by your DeepSpeed settings: are they equal?",
        description="Train a few steps by plain PyTorch in one process and as configured; compare.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", default="default", metavar="YAML",
                        help="a file, or the name of one of configs/ (%(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, metavar="N",
                        help="updates of each (%(default)s)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=None, metavar="N",
                        help="processes of the engine (default: one a GPU, 2 without)")  # fmt: skip
    parser.add_argument("--batch", type=int, default=None, metavar="B",
                        help="global batch (default: 8 images a forward)")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers there")
    parser.add_argument("overrides", nargs="*", metavar="key=value",
                        help="settings, for example engine.zero_stage=3")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Prints the differences; UserError where one of the trainings cannot be."""
    from mimkit.audit.engine import numbers
    from mimkit.config import load_config
    from mimkit.files import write_text

    arguments.ranks = _devices() if arguments.ranks is None else arguments.ranks
    check_range(arguments, steps=(2, 1000), ranks=(1, 1024))
    config = load_config(find_config(arguments.config), arguments.overrides)
    parity = _measure(config, arguments)
    print(_text(parity, config, ranks=arguments.ranks))
    if arguments.json:
        write_text(arguments.json, json.dumps(numbers(parity), indent=1))
        print(f"wrote {arguments.json}")
    return 0 if parity.equal else 1


def _devices() -> int:
    import torch

    return torch.cuda.device_count() or 2


def _measure(config: "Config", arguments: argparse.Namespace) -> "Parity":
    from mimkit.audit.engine import compare, read_trace
    from mimkit.audit.engine_runs import write_configs
    from mimkit.build import use_bf16
    from mimkit.cli._audit._engine_launch import train

    with tempfile.TemporaryDirectory(prefix="mimkit-engine-") as name:
        folder = Path(name)
        plain, theirs = write_configs(config, folder, steps=arguments.steps,
                                      ranks=arguments.ranks, batch=arguments.batch)  # fmt: skip
        # theirs first: it is the one in which a setting can be wrong
        train(theirs, ranks=arguments.ranks, patience=_PATIENCE)
        train(plain, ranks=1, patience=_PATIENCE)
        return compare(
            read_trace(folder / "plain"), read_trace(folder / "theirs"),
            precision="bf16" if use_bf16(config.engine) else "fp32", beta2=config.train.betas[1],
        )  # fmt: skip


def _text(parity: "Parity", config: "Config", *, ranks: int) -> str:
    from mimkit.audit.engine import LOSS_TOLERANCE, WEIGHT_TOLERANCE

    engine, precision = config.engine, parity.precision
    recomputed = ", activation checkpointing" if engine.activation_checkpointing else ""
    compiled = ", compiled blocks" if engine.compile else ""
    file = f", {engine.deepspeed_config}" if engine.deepspeed_config else ""
    norm = ("" if parity.norm_difference is None
            else f"; gradient norms {parity.norm_difference:.1e} (relative)")  # fmt: skip
    lines = [
        f"plain PyTorch in one process against ZeRO {engine.zero_stage} on {ranks} ranks, "
        f"accumulation {engine.accumulation}, clipping {config.train.clip_grad:g}, {precision}"
        f"{recomputed}{compiled}{file}",
        f"{len(parity.losses)} updates, loss {parity.plain_losses[0]:.4f} -> "
        f"{parity.plain_losses[-1]:.4f}",
        f"losses:  differ by at most {parity.loss_difference:.2e} (allowed "
        f"{LOSS_TOLERANCE[precision]:g}){norm}  {'equal' if parity.losses_agree else 'DIFFERENT'}",
        f"weights: differ by at most {parity.worst.steps:.2g} of AdamW's way (allowed "
        f"{WEIGHT_TOLERANCE[precision]:g})  {'equal' if parity.weights_agree else 'DIFFERENT'}",
    ]
    lines += [
        f"  {one.name}: {one.largest:.2e}, {one.steps:.2g} of the way"
        + (f"; {one.noise} elements whose gradient is noise were left out" if one.noise else "")
        for one in parity.tensors[:_SHOWN]
    ]
    return "\n".join([*lines, *([] if parity.equal else _advice(config))])


def _advice(config: "Config") -> list[str]:
    """What usually is behind a difference."""
    if config.engine.accumulation > 1:
        return [
            "engine.accumulation: a batch norm normalises by one micro-batch, and a mask of no "
            "exact count weights micro-batches evenly; compare with engine.accumulation=1, or take "
            "a stem with stem.norm=ln"
        ]
    return ["leave the keys of engine.deepspeed_config out one by one to find the one that does it"]
