"""Write a run's encoder for another library, and prove that it gives the same features there.

  python tools/export.py runs/latest --format timm encoder.safetensors

The file is loaded back by the other library and run on the same images; if any number differs by
more than 1e-5, nothing is written and the exit code is 2.

  python tools/export.py runs/latest --format timm --regroup 2 parallel.safetensors

--regroup N writes a sequential encoder as a parallel one: N consecutive blocks become the branches
of one block, with their weights as they are. That is another function: its tokens differ from the
trained encoder's. A table says by how much after each block, and the file's metadata hold it; the
proof then compares the file with the regrouped encoder.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mimkit.models.regroup import Movement


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="mimkit export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run folder or one of its checkpoints")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--format", default="timm", help="the library to write for (default: timm)")
    parser.add_argument(
        "--regroup",
        type=int,
        metavar="N",
        help="make N consecutive blocks the branches of one; N divides the depth (default: do not)",
    )
    arguments = parser.parse_args(argv)
    from mimkit.encoder_io import export_run

    done = export_run(
        arguments.run,
        format_name=arguments.format,
        out=arguments.out,
        branches=arguments.regroup,
    )
    report = done.report
    if done.moved:
        print(_table(done.moved, branches=arguments.regroup, images=report.images))
    print(
        f"wrote {report.path}: {report.parameters / 1e6:.2f} M parameters, "
        f"{report.bytes / 2**20:.1f} MiB\n"
        f"proof: on {report.images} images the outputs differ by at most "
        f"{report.max_difference:.1e} (allowed {report.tolerance:.0e})\n"
        f"load it: from mimkit.export.{arguments.format} import load; "
        f"model = load('{report.path}')"
    )
    return 0


def _table(moved: "Sequence[Movement]", *, branches: int, images: int) -> str:
    """How far tokens moved, a line a block of the regrouped encoder."""
    lines = [
        f"regrouped, {branches} blocks in one; how far this moved the tokens of {images} images, "
        "relative to their norm:",
        "block  made of      mean   largest",
    ]
    for row in moved:
        last = row.block * branches
        made_of = f"{last - branches + 1}-{last}"
        lines.append(f"{row.block:5}  {made_of:>7}{row.mean:10.1e}{row.max:10.1e}")
    return "\n".join(lines)
