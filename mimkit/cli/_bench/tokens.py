"""`mimkit bench tokens`: a token bank beside a tokenizer in every step."""

import argparse

from mimkit.cli._bench._comparison import add_comparison, check_counts, run_comparison
from mimkit.cli._folder import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    add_comparison(
        subparsers,
        "tokens",
        summary="a token bank beside a tokenizer in every step",
        description="Tokens out of a bank, beside BEiT's step with DALL-E's tokenizer in it.",
        batch=4,
        rounds=3,
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    check_counts(arguments)
    from mimkit.bench.tokens import measure_tokens

    return run_comparison(arguments, measure_tokens, variants=4)
