"""`mimkit bench finetune`: only the attention, or only the MLPs, beside all weights."""

import argparse

from mimkit.cli._bench._comparison import add_comparison, check_counts, run_comparison
from mimkit.cli._folder import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    add_comparison(
        subparsers,
        "finetune",
        summary="attention only, MLPs only and all weights: time and memory",
        description="Finetuning only the attention, or only the MLPs, beside all: time and memory.",
        batch=4,
        rounds=3,
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    check_counts(arguments)
    from mimkit.bench.finetune import measure_finetune

    return run_comparison(arguments, measure_finetune, variants=3)
