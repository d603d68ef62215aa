"""`mimkit bench tokens`: a token bank beside a tokenizer in every step."""

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
        "tokens",
        help="a token bank beside a tokenizer in every step",
        description="Tokens out of a bank, beside BEiT's step with DALL-E's tokenizer in it.",
        epilog="example: tools/bench.py tokens --size S --json tokens.json",
    )
    add_machine_arguments(parser, batch=4, rounds=3)
    add_precision(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    check_positive(arguments, "batch", "rounds")
    from mimkit.bench.tokens import measure_tokens

    device = device_of(arguments)
    with progress("tokens", 4 * (1 + arguments.rounds)) as done:
        found = measure_tokens(
            arguments.size, batch=arguments.batch, bf16=one_precision(arguments, device),
            device=device, rounds=arguments.rounds, done=done,
        )  # fmt: skip
    tell(arguments, [found])
    return 0
