"""`mimkit bench parallel`: latency of parallel blocks, fused and not."""

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
        "parallel",
        help="latency of parallel blocks, fused and not",
        description="Latency by batch size: blocks in a row, branch by branch, and fused.",
        epilog="example: tools/bench.py parallel --size S --json parallel.json",
    )
    add_machine_arguments(parser, batch=None, rounds=5)
    add_precision(parser)
    parser.add_argument("--most", type=int, default=64, metavar="N",
                        help="the largest batch (%(default)s)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    check_positive(arguments, "rounds", "most")
    from mimkit.bench.parallel import BATCHES, measure_parallel

    device = device_of(arguments)
    batches = [batch for batch in BATCHES if batch <= arguments.most]
    with progress("parallel", 3 * len(batches) * (1 + arguments.rounds)) as done:
        found = measure_parallel(
            arguments.size, batches=batches, bf16=one_precision(arguments, device),
            device=device, rounds=arguments.rounds, done=done,
        )  # fmt: skip
    tell(arguments, found)
    return 0
