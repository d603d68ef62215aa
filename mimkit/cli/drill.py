"""Break small runs on purpose and see what mimkit's promises are worth on this machine.

  python tools/drill.py --short                       a minute: every kind of accident
  python tools/drill.py                               all of them, ten random kills
  python tools/drill.py --kills 100 --save-kills 100  as long as it takes

Runs train the embedded data on the CPU, one rank or two. Prints a table of which promise held; the
exit code is 1 if one did not. As root it mounts a small disk in memory for the time of one drill.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mimkit.cli._arguments import check_range, output_file
from mimkit.errors import UserError

if TYPE_CHECKING:
    from mimkit.drills import Drill, Outcome


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.kills is None:
        arguments.kills = 2 if arguments.short else 10
    if arguments.save_kills is None:
        arguments.save_kills = 20 if arguments.short else 50
    check_range(arguments, kills=(0, 100_000), save_kills=(0, 100_000))
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    from mimkit.drills import all_drills, run_drills

    chosen = _choose(all_drills(), arguments)
    outcomes = list["Outcome"]()
    with tempfile.TemporaryDirectory(prefix="mimkit-drill-") as folder:
        for outcome in run_drills(
            chosen, Path(folder), kills=arguments.kills, save_kills=arguments.save_kills
        ):
            outcomes.append(outcome)
            print(_row(outcome), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=2) + "\n")
    broken = [outcome.name for outcome in outcomes if not outcome.held]
    print(f"{len(outcomes) - len(broken)} of {len(outcomes)} promises held"
          + (f"; broken: {', '.join(broken)}" if broken else ""))  # fmt: skip
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mimkit drill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="one of each kind, two random kills")
    parser.add_argument("--kills", type=int, metavar="N", help="random kills in training")
    parser.add_argument("--save-kills", type=int, metavar="N", help="random kills in saving")
    parser.add_argument("--only", metavar="WORDS", help="drills whose name has these words")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="the table, for machines")
    return parser


def _choose(drills: "list[Drill]", arguments: argparse.Namespace) -> "list[Drill]":
    if arguments.only is not None:
        found = [drill for drill in drills if arguments.only.lower() in drill.name.lower()]
        if not found:
            names = ", ".join(f"'{drill.name}'" for drill in drills)
            raise UserError(f"--only '{arguments.only}' names no drill. There are {names}")
        return found
    return [drill for drill in drills if drill.short or not arguments.short]


def _row(outcome: "Outcome") -> str:
    mark = "held  " if outcome.held else "BROKEN"
    return (f"{mark} {outcome.name:32} {outcome.seconds:6.1f} s  {outcome.promise}\n"
            f"       {outcome.said}")  # fmt: skip
