"""`mimkit bench engine`: what DeepSpeed and the flight recorder cost over plain PyTorch."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from mimkit.cli._arguments import check_range, output_file
from mimkit.cli._folder import Subparsers

if TYPE_CHECKING:  # slow to import, and --help does not need it
    from mimkit.bench.engine import EngineReport

_EPILOG = """
One process, one thread, fp32: forward, backward, clipping and update of a ViT-Ti at 224 pixels, by
each way in turns. Times are CPU time; ratios are medians over rounds, with the least and the most.
On more ranks there is communication besides.

example:
  tools/bench.py engine --stages 0 1 2 3 --rounds 8 --json engine.json
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "engine",
        help="an update by plain PyTorch, DeepSpeed at each ZeRO stage, with the flight recorder",
        description="What the engine costs over plain PyTorch in one process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2], choices=range(4),
                        metavar="N", help="of ZeRO (default: 0 1 2)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=6, metavar="R",
                        help="everything is measured R times (%(default)s)")  # fmt: skip
    parser.add_argument("--batch", type=int, default=8, metavar="B",
                        help="images of an update (%(default)s)")  # fmt: skip
    parser.add_argument("--depth", type=int, default=6, metavar="L",
                        help="blocks (%(default)s)")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers there")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table."""
    check_range(arguments, rounds=(1, 1000), batch=(1, 4096), depth=(1, 64))
    from mimkit.bench.engine import measure
    from mimkit.files import write_text

    report = measure(stages=tuple(dict.fromkeys(arguments.stages)), rounds=arguments.rounds,
                     batch=arguments.batch, depth=arguments.depth)  # fmt: skip
    print(_text(report, rounds=arguments.rounds))
    if arguments.json:
        write_text(arguments.json, json.dumps(asdict(report), indent=1))
        print(f"wrote {arguments.json}")
    return 0


def _text(report: "EngineReport", *, rounds: int) -> str:
    width = max(map(len, report.seconds))
    lines = [f"{report.parameters / 1e6:.2f} M parameters, {report.batch} images an update, fp32, "
             f"one thread; {rounds} rounds"]  # fmt: skip
    for name, seconds in report.seconds.items():
        ratio = report.ratio[name]
        lines.append(f"  {name:{width}}  {1000 * seconds.median:7.1f} ms  x {ratio.median:.3f} "
                     f"({ratio.least:.3f} to {ratio.most:.3f})")  # fmt: skip
    return "\n".join(lines)
