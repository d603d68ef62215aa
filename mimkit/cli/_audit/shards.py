"""`mimkit audit shards`: is a set of tars whole, sound, apart from the other split, and mixed."""

import argparse
import json
from pathlib import Path

from mimkit.cli._arguments import output_file
from mimkit.cli._folder import Subparsers
from mimkit.cli._progress import bars
from mimkit.errors import UserError

_EPILOG = """
PATTERN is what data.train takes: a tar, a folder of tars, a glob, 'train-{0000..0012}.tar', or
several of these; tars on a server are to be fetched first. They are read and never written to, and
nothing in them is unpacked or run.

Problems make a set unfit, warnings do not. Exit code: 0 fit, 1 not fit, 2 wrong use.

One core takes about 2 ms for a photograph of ImageNet, 40 minutes for all; with --sample a tenth.

examples:
  tools/audit.py shards shards/train --against shards/val
  tools/audit.py shards 'shards/train-*.tar' --sample 2000 --json shards.json
  tools/audit.py shards shards/train --batch 1024 --ranks 8 --window 16
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "shards",
        help="damage, duplicates, leaks between splits, labels, sizes, shuffling, speed",
        description="Examine a set of tars before it is trained on.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shards", nargs="+", metavar="PATTERN", help="the tars")
    parser.add_argument("--against", nargs="+", metavar="PATTERN",
                        help="another split: images that are in both are problems, and so is "
                        "what is wrong with it")  # fmt: skip
    parser.add_argument("--sample", type=int, metavar="N",
                        help="decode only N images of each split, drawn by --seed; all are "
                        "read (default: decode all)")  # fmt: skip
    parser.add_argument("--window", type=int, default=8, metavar="TARS",
                        help="data.window (default: %(default)s)")  # fmt: skip
    parser.add_argument("--batch", type=int, default=2048, metavar="B",
                        help="train.batch_size, over all ranks (default: %(default)s)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, metavar="R",
                        help="processes that share a batch (default: %(default)s)")  # fmt: skip
    parser.add_argument("--view", type=int, default=224, metavar="PIXELS",
                        help="data.image_size (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="S",
                        help="of the order and of --sample (default: 0)")  # fmt: skip
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/mimkit"), metavar="DIR",
                        help="data.cache_dir, for indexes of read-only folders")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all findings there")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 1 for a set that is not fit. UserError for a pattern or number that
    cannot be."""
    _check(arguments)
    from mimkit.audit.shards import examine
    from mimkit.audit.shards_text import say

    with bars() as progress:
        report = examine(
            arguments.shards,
            against=arguments.against,
            window=arguments.window,
            batch=arguments.batch,
            ranks=arguments.ranks,
            seed=arguments.seed,
            view=arguments.view,
            sample=arguments.sample,
            cache_dir=arguments.cache_dir,
            progress=progress,
        )
    print(say(report))
    if arguments.json:
        from mimkit.files import write_text

        write_text(arguments.json, json.dumps(report.record(), indent=1))
        print(f"wrote {arguments.json}")
    return 0 if report.fit else 1


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("window", 1), ("batch", 1), ("ranks", 1), ("view", 8), ("seed", 0),
                        ("sample", 0)):  # fmt: skip
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}; set it to {least} or more")
    batch, ranks = arguments.batch, arguments.ranks
    if batch % ranks:
        above = (batch // ranks + 1) * ranks
        raise UserError(f"--batch {batch} does not divide into --ranks {ranks}; set --batch to "
                        f"{above}, or change --ranks")  # fmt: skip
