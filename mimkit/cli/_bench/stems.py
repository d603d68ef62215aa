"""`mimkit bench stems`: every stem: alone, and what it adds to a step."""

import argparse

from mimkit.cli._bench._comparison import add_comparison, check_counts, run_comparison
from mimkit.cli._folder import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    add_comparison(
        subparsers,
        "stems",
        summary="every stem: alone, and what it adds to a step",
        description="Forward and backward of every stem, and what it adds to a whole step.",
        batch=8,
        rounds=7,
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    check_counts(arguments)
    from mimkit.bench.stems import measure_stems
    from mimkit.models.stems import STEMS

    return run_comparison(arguments, measure_stems, variants=1 + len(STEMS.names()))
