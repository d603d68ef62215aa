"""`mimkit bench data`: the input pipeline by stage, beside BEiT's own and decoding alone."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from mimkit.cli._arguments import output_file
from mimkit.cli._folder import Subparsers
from mimkit.errors import UserError

if TYPE_CHECKING:  # they are slow to import, and --help does not need them
    from mimkit.data.sources import Source

_GPU_RATES = (1000.0, 3000.0)  # images a second that a GPU may take
_EPILOG = """
Both pipelines make a 224-pixel and a 112-pixel view of one crop, from the same draws; it is proven
first that they give the same pixels. Times are CPU time in one thread; ratios are medians over
rounds in which all are measured in turns. Still, measure on a quiet machine: other load empties the
caches, and then all is slower, our views by more than decoding alone.

Without --shards the embedded data set is used, whose crops are small: numbers of ImageNet need
ImageNet's images.

example:
  tools/bench.py data --shards shards/train --images 500 --gpu-rate 2500 --json data.json
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "data",
        help="loading images: every stage, BEiT's own pipeline, cores for a GPU",
        description="The input pipeline by stage, beside BEiT's own in Pillow and decoding alone.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shards", metavar="PATTERN",
                        help="tars, as in data.train (default: the embedded data set)")  # fmt: skip
    parser.add_argument("--images", type=int, default=200, metavar="N",
                        help="the first N are used (%(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="R",
                        help="everything is measured R times (%(default)s)")  # fmt: skip
    parser.add_argument("--gpu-rate", type=float, metavar="IMAGES_PER_S",
                        help="say how many cores a GPU of this speed needs")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="F", help="write the numbers to a file")
    parser.add_argument("--cache-dir", default="~/.cache/mimkit", metavar="DIR",
                        help="for the embedded data set and for indexes of read-only tars "
                        "(%(default)s)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    for option in ("images", "rounds", "gpu_rate"):
        value = getattr(arguments, option)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{option.replace('_', '-')} is {value}; expected more than 0")
    from mimkit.bench.data import measure, num_pieces
    from mimkit.cli._bench._data_report import as_numbers, as_text
    from mimkit.files import write_text

    source = _open(arguments.shards, Path(arguments.cache_dir).expanduser())
    with tqdm(total=num_pieces(arguments.rounds), desc="bench data", disable=None) as bar:
        report = measure(source, images=arguments.images, rounds=arguments.rounds, done=bar.update)
    rates = (arguments.gpu_rate,) if arguments.gpu_rate else _GPU_RATES
    print(as_text(report, shards=arguments.shards, rates=rates))
    if arguments.json:
        numbers = as_numbers(report, shards=arguments.shards, rates=rates)
        write_text(arguments.json, json.dumps(numbers, indent=2) + "\n")
    return 0


def _open(shards: str | None, cache: Path) -> "Source":
    from mimkit.data.embedded import embedded_shards
    from mimkit.data.sources.shards import ShardSource

    if shards is None:
        shards = str(embedded_shards(cache) / "train-*.tar")
    return ShardSource(shards=shards, cache_dir=cache)
