"""What the sub-verbs have in common that compare whole steps: arguments, progress, report."""

import argparse
from collections.abc import Callable
from typing import Any

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


def add_comparison(
    subparsers: Subparsers, name: str, *, summary: str, description: str, batch: int, rounds: int
) -> None:
    """The parser of a sub-verb; `batch` and `rounds` are its defaults."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example: tools/bench.py {name} --size S --json {name}.json",
    )
    add_machine_arguments(parser, batch=batch, rounds=rounds)
    add_precision(parser)


def run_comparison(
    arguments: argparse.Namespace, measure: Callable[..., Any], *, variants: int
) -> int:
    """Measures, with a bar of `variants` steps a round, and tells.

    Raises:
        UserError: for what a user can mend.
    """
    device = device_of(arguments)
    with progress(arguments.what, variants * (1 + arguments.rounds)) as done:
        found = measure(
            arguments.size, batch=arguments.batch, bf16=one_precision(arguments, device),
            device=device, rounds=arguments.rounds, done=done,
        )  # fmt: skip
    tell(arguments, [found])
    return 0


def check_counts(arguments: argparse.Namespace) -> None:
    """UserError before anything slow is imported."""
    check_positive(arguments, "batch", "rounds")
