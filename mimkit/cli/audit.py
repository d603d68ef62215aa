"""`mimkit audit WHAT`: measure a part before hours are spent on it."""

import argparse
import importlib
import pkgutil
from collections.abc import Sequence

from mimkit.cli import _audit

_EPILOG = """
mimkit audit WHAT --help tells more. Example:
  tools/audit.py mask --json masks.json --picture pictures
"""


def audits() -> list[str]:
    """Every file of `_audit/` is an audit."""
    names = (module.name for module in pkgutil.iter_modules(_audit.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def main(argv: Sequence[str]) -> int:
    """Runs the audit; raises UserError for what a user can mend."""
    parser = argparse.ArgumentParser(
        prog="mimkit audit",
        description="Measure a part before hours are spent on it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    modules = {name: importlib.import_module(f"{_audit.__name__}.{name}") for name in audits()}
    for module in modules.values():
        module.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    code: int = modules[arguments.what].run(arguments)
    return code
