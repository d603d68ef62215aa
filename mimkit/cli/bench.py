"""`mimkit bench WHAT`: how fast a part is on this machine, beside the plain way of doing it."""

from collections.abc import Sequence

from mimkit.cli import _bench
from mimkit.cli._folder import run_folder


def main(argv: Sequence[str]) -> int:
    """Every file of `_bench/` is a measurement."""
    return run_folder(
        _bench,
        argv,
        prog="mimkit bench",
        description="How fast a part is on this machine, beside the plain way of doing it.",
        example="tools/bench.py data --shards shards/train --json data.json",
    )
