"""`mimkit bench scaling`: hours, data, storage and networks of pretrainings, by arithmetic."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimkit.cli._arguments import output_file
from mimkit.cli._bench._common import check_positive, write_json
from mimkit.cli._folder import Subparsers
from mimkit.errors import UserError

if TYPE_CHECKING:  # slow to import, and --help does not need it
    from mimkit.bench.scaling import Figures

_EPILOG = """
Nothing is measured here. FLOPs, parameters and bytes are counted; what a GPU and a network reach is
assumed, unless you give it, or the JSON of a bench that measured it:

  tools/bench.py step --device cuda --size B --batch 128 --json step.json
  tools/bench.py data --shards shards/train --json data.json
  tools/bench.py scaling --step step.json --data data.json --network 50
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "scaling",
        help="arithmetic of whole pretrainings on 8 to 64 GPUs",
        description="Hours, cores, storage and exchange of gradients on 8 to 64 GPUs: arithmetic.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--teraflops", type=float, default=346.0, metavar="T",
                        help="of a GPU in the step (%(default)s: 35 %% of an H100)")  # fmt: skip
    parser.add_argument("--network", type=float, default=25.0, metavar="GB_PER_S",
                        help="of a GPU to other machines (%(default)s)")  # fmt: skip
    parser.add_argument("--link", type=float, default=300.0, metavar="GB_PER_S",
                        help="of a GPU to others in the machine (%(default)s)")  # fmt: skip
    parser.add_argument("--batch", type=int, default=2048, metavar="N",
                        help="of an update, all GPUs together (%(default)s)")  # fmt: skip
    parser.add_argument("--step", type=Path, metavar="F",
                        help="JSON of bench step: what a GPU reached there")  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="F",
                        help="JSON of bench data: images a second of a core")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="F", help="write the numbers to a file")


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    check_positive(arguments, "teraflops", "network", "link", "batch")
    from mimkit.cli._bench._scaling_report import as_numbers, as_text

    figures, sources = _figures(arguments)
    print(as_text(figures, sources, batch=arguments.batch))
    write_json(arguments, as_numbers(figures, sources, batch=arguments.batch))
    return 0


def _figures(arguments: argparse.Namespace) -> tuple["Figures", dict[str, str]]:
    """The figures, and where each of them comes from."""
    from mimkit.bench.scaling import Figures

    default = Figures()
    teraflops, data_seconds = arguments.teraflops, default.data_seconds
    sources = dict.fromkeys(("teraflops", "network", "link"), "assumed")
    sources |= dict.fromkeys(("data_seconds", "jpeg_bytes"), "measured elsewhere")
    if arguments.step is not None:
        teraflops = _reached(_read(arguments.step), arguments.step)
        sources["teraflops"] = f"measured, {arguments.step.name}"
    if arguments.data is not None:
        data_seconds = 1 / _number(_read(arguments.data), arguments.data,
                                   "images_per_second_per_core")  # fmt: skip
        sources["data_seconds"] = f"measured, {arguments.data.name}"
    figures = Figures(
        teraflops=teraflops, network=1e9 * arguments.network, link=1e9 * arguments.link,
        data_seconds=data_seconds,
    )  # fmt: skip
    return figures, sources


def _reached(step: Mapping[str, Any], path: Path) -> float:
    """TFLOP/s of the fastest way that was timed."""
    rows = [row for precision in step.get("precisions", ()) for row in precision["rows"].values()]
    rates = [row["images_per_second"] for row in rows if "images_per_second" in row]
    if not rates:
        raise UserError(f"{path} has no timed steps; give a file that bench step --json wrote")
    return float(max(rates)) * _number(step, path, "step_gflop") / 1e3


def _number(found: Mapping[str, Any], path: Path, key: str) -> float:
    value = found.get(key)
    if not isinstance(value, int | float) or not value > 0:
        raise UserError(f"{path} has no {key}, a number above 0; was it written by bench --json?")
    return float(value)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object; give a file that bench --json wrote")
    return found
