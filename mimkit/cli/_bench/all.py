"""`mimkit bench all`: every measurement with its defaults, one after the other."""

import argparse
import importlib
from pathlib import Path

from mimkit.cli._arguments import output_folder
from mimkit.cli._folder import Subparsers

ORDER = ("data", "step", "stems", "tokens", "optimizer", "finetune", "parallel")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "all",
        help="all of them, with their defaults",
        description=f"Every measurement with its defaults: {', '.join(ORDER)}.",
        epilog="example: tools/bench.py all --size S --out bench",
    )
    parser.add_argument("--size", choices=["Ti", "S", "B", "L"], default="S",
                        help="of the ViT (%(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    parser.add_argument("--out", type=output_folder, metavar="DIR",
                        help="write WHAT.json of each into this folder")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    code = 0
    for name in ORDER:
        print(f"== {name}", flush=True)
        words = _words(name, arguments)
        module = importlib.import_module(f"mimkit.cli._bench.{name}")
        parser = argparse.ArgumentParser(prog="mimkit bench")
        module.add_parser(parser.add_subparsers(dest="what"))
        code = max(code, module.run(parser.parse_args(words)))
        print(flush=True)
    return code


def _words(name: str, arguments: argparse.Namespace) -> list[str]:
    words = [name]
    if name != "data":
        words += ["--size", arguments.size, "--device", arguments.device]
    if arguments.out is not None:
        folder: Path = arguments.out
        folder.mkdir(parents=True, exist_ok=True)
        words += ["--json", str(folder / f"{name}.json")]
    return words
