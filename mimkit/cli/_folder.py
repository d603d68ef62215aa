"""A verb whose sub-verbs are the files of a folder, each with `add_parser` and `run`."""

import argparse
import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def sub_verbs(folder: ModuleType) -> list[str]:
    """Every file of the folder that does not begin with `_`."""
    found = (module.name for module in pkgutil.iter_modules(folder.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def run_folder(
    folder: ModuleType, argv: Sequence[str], *, prog: str, description: str, example: str
) -> int:
    """Runs the sub-verb that is named first; raises UserError for what a user can mend."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"\n{prog} WHAT --help tells more. Example:\n  {example}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    modules = {name: importlib.import_module(f"{folder.__name__}.{name}")
               for name in sub_verbs(folder)}  # fmt: skip
    for module in modules.values():
        module.add_parser(subparsers)
    if argv and argv[0] in modules:  # settings may stand between options there
        arguments = subparsers.choices[argv[0]].parse_intermixed_args(argv[1:])
        arguments.what = argv[0]
        code: int = modules[argv[0]].run(arguments)
        return code
    parser.parse_args(argv)  # says what is wrong, or helps
    raise AssertionError("there is no such sub-verb")
