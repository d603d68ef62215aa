"""`mimkit bench WHAT`: how fast a part is on this machine, beside the plain way of doing it."""

import argparse
import importlib
import pkgutil
from collections.abc import Sequence

from mimkit.cli import _bench

_EPILOG = """
mimkit bench WHAT --help tells more. Example:
  tools/bench.py data --shards shards/train --json data.json
"""


def measurements() -> list[str]:
    """Every file of `_bench/` is a measurement."""
    names = (module.name for module in pkgutil.iter_modules(_bench.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def main(argv: Sequence[str]) -> int:
    """Runs the measurement; raises UserError for what a user can mend."""
    parser = argparse.ArgumentParser(
        prog="mimkit bench",
        description="How fast a part is on this machine, beside the plain way of doing it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    modules = {name: importlib.import_module(f"{_bench.__name__}.{name}")
               for name in measurements()}  # fmt: skip
    for module in modules.values():
        module.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    code: int = modules[arguments.what].run(arguments)
    return code
