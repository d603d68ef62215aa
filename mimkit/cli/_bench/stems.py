"""`mimkit bench stems`: every stem: alone, and what it adds to a step."""

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
        "stems",
        help="every stem: alone, and what it adds to a step",
        description="Forward and backward of every stem, and what it adds to a whole step.",
        epilog="example: tools/bench.py stems --size S --json stems.json",
    )
    add_machine_arguments(parser, batch=8, rounds=7)
    add_precision(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    check_positive(arguments, "batch", "rounds")
    from mimkit.bench.stems import measure_stems
    from mimkit.models.stems import STEMS

    device = device_of(arguments)
    with progress("stems", (1 + len(STEMS.names())) * (1 + arguments.rounds)) as done:
        found = measure_stems(
            arguments.size, batch=arguments.batch, bf16=one_precision(arguments, device),
            device=device, rounds=arguments.rounds, done=done,
        )  # fmt: skip
    tell(arguments, [found])
    return 0
