"""`mimkit audit WHAT`: measure a part before hours are spent on it."""

from collections.abc import Sequence

from mimkit.cli import _audit
from mimkit.cli._folder import run_folder


def main(argv: Sequence[str]) -> int:
    """Every file of `_audit/` is an audit."""
    return run_folder(
        _audit,
        argv,
        prog="mimkit audit",
        description="Measure a part before hours are spent on it.",
        example="tools/audit.py mask --json masks.json --picture pictures",
    )
