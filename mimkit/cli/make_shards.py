"""`mimkit make_shards SRC OUT`: images or tars -> WebDataset shards with an index."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:  # it is slow to import, and --help does not need it
    from mimkit.data.make_shards import Report

_LISTED = 10  # failures
_EPILOG = """
SRC is a folder with one subfolder for each class (SRC/cat/1.jpg), a flat folder without labels,
or tars: a folder of *.tar, a glob, or a pattern such as 'train-{0000..0012}.tar'.

Every image is decoded once; damaged ones are left out and listed in OUT/failures.csv. A run that
was interrupted goes on when the same command is given again; until it is complete the shards lie
in OUT.partial.

example:
  tools/make_shards.py imagenet/train shards/train
  tools/make_shards.py imagenet/val shards/val --name val
"""


def main(argv: Sequence[str]) -> int:
    """Runs the command; raises UserError for what a user can mend."""
    args = _parser().parse_args(argv)
    from mimkit.data.make_shards import make_shards

    bar = tqdm(unit="image", desc="decode and write", disable=None)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        report = make_shards(
            args.src,
            args.out,
            name=args.name,
            samples_per_shard=args.samples_per_shard,
            max_failures=args.max_failures,
            shuffle_seed=args.shuffle_seed,
            cache_dir=args.cache_dir,
            progress=progress,
        )
    print(_summary(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mimkit make_shards",
        description="Turn images into WebDataset shards with an index, checksums and counts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", help="a folder of images, or tars")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to be made")
    parser.add_argument(
        "--name", default="train", help="shards are called NAME-00000.tar, ... (%(default)s)"
    )
    parser.add_argument(
        "--samples-per-shard", type=int, default=1000, metavar="N", help="at most (%(default)s)"
    )
    parser.add_argument(
        "--max-failures",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="give up if more than this share of the images, and more than ten, are damaged; "
        "0 allows none (%(default)s)",
    )
    parser.add_argument(
        "--shuffle-seed", type=int, default=0, metavar="S", help="key of the order (%(default)s)"
    )
    parser.add_argument(
        "--cache-dir",
        default="~/.cache/mimkit",
        metavar="DIR",
        help="where the indexes of read-only tars go (%(default)s)",
    )
    return parser


def _summary(report: "Report") -> str:
    from mimkit.data.writer import FAILURES

    done = "holds already" if report.was_complete else "has"
    lines = [
        f"{report.out} {done} {report.num_samples} samples in {report.num_shards} shards "
        f"({report.num_bytes / 1e6:.1f} MB)."
    ]
    if report.was_complete:
        lines.append("They were made from the same source; nothing to do.")
    if report.failures:
        lines.append(f"Left out: {len(report.failures)} images, see {report.out / FAILURES}:")
        lines += [f"  {failure.origin}: {failure.cause}" for failure in report.failures[:_LISTED]]
    if len(report.failures) > _LISTED:
        lines.append(f"  ... and {len(report.failures) - _LISTED} more")
    lines.append(
        f"Next: deepspeed tools/pretrain.py data.train={report.out} data.heldout=OTHER\n"
        "  (OTHER: shards that were held out, or null)"
    )
    return "\n".join(lines)
