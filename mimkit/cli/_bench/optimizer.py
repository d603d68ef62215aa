"""`mimkit bench optimizer`: fused AdamW beside the plain loop."""

import argparse

from mimkit.cli._bench._common import (
    add_machine_arguments,
    check_positive,
    device_of,
    progress,
    tell,
)
from mimkit.cli._folder import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "optimizer",
        help="fused AdamW beside the plain loop",
        description="One update of all weights: AdamW in one kernel, as a loop, as foreach.",
        epilog="example: tools/bench.py optimizer --size S --json optimizer.json",
    )
    add_machine_arguments(parser, batch=None, rounds=7)


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    check_positive(arguments, "rounds")
    from mimkit.bench.optimizer import measure_optimizer

    device = device_of(arguments)
    with progress("optimizer", 3 * (1 + arguments.rounds)) as done:
        found = measure_optimizer(arguments.size, device=device, rounds=arguments.rounds, done=done)
    tell(arguments, [found])
    return 0
