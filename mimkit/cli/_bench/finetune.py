"""`mimkit bench finetune`: attention only beside all weights: time and memory."""

import argparse

from mimkit.cli._bench._common import (
    add_machine_arguments,
    add_precision,
    check_positive,
    device_of,
    one_precision,
    progress,
    tell,
)
from mimkit.cli._folder import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "finetune",
        help="attention only beside all weights: time and memory",
        description="Finetuning the attention layers only, beside all weights: time and memory.",
        epilog="example: tools/bench.py finetune --size S --json finetune.json",
    )
    add_machine_arguments(parser, batch=4, rounds=3)
    add_precision(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    check_positive(arguments, "batch", "rounds")
    from mimkit.bench.finetune import measure_finetune

    device = device_of(arguments)
    with progress("finetune", 2 * (1 + arguments.rounds)) as done:
        found = measure_finetune(
            arguments.size, batch=arguments.batch, bf16=one_precision(arguments, device),
            device=device, rounds=arguments.rounds, done=done,
        )  # fmt: skip
    tell(arguments, [found])
    return 0
