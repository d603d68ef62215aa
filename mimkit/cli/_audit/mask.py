"""`mimkit audit mask`: exact counts, where patches are masked, symmetry, blocks and time."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from mimkit.cli._arguments import check_range, output_file, output_folder
from mimkit.cli._audit import parse_part
from mimkit.cli._folder import Subparsers
from mimkit.errors import UserError

if TYPE_CHECKING:  # they are slow to import, and --help does not need them
    from mimkit.audit.mask import MakeMask, MaskCertificate
    from mimkit.batch import Grid
    from mimkit.masks import Mask

_COLUMNS = ("mask", "exact", "mean", "min", "max", "corner", "edge", "centre", "blocks", "size",
            "flip p", "us", "counts")  # fmt: skip
_LEGEND = """\
exact: share of draws with just that count; mean: patches in a draw. min ... centre: how often a
patch is masked, known to +-{precision:.1%}; the same everywhere would be {uniform:.1%}; edge: the \
rim.
blocks, size: connected regions in a draw, and their patches. flip p: chance of a mask without
preferred side to look as lopsided (below .01: it has one). us: microseconds of one core for a mask.
counts: what this grid takes with these settings."""
_EPILOG = """
A mask may have settings: --mask blockwise:min_block=4,aspect=0.5

examples:
  tools/audit.py mask                                    every mask, 75 of BEiT's 14 x 14 patches
  tools/audit.py mask --mask blockwise random --grid 6 6 --count 14
  tools/audit.py mask --json masks.json --picture pictures
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "mask",
        help="exact counts, where patches are masked, symmetry, blocks, time",
        description="Draw many masks and measure what they promise.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mask", nargs="+", metavar="NAME", help="which (default: every one)")
    parser.add_argument("--grid", nargs=2, type=int, default=(14, 14), metavar=("H", "W"),
                        help="rows and columns of patches (default: 14 14)")  # fmt: skip
    parser.add_argument("--count", type=int, metavar="K",
                        help="masked patches (default: BEiT's share, 75 of 196)")  # fmt: skip
    parser.add_argument("--draws", type=int, default=20_000, metavar="N",
                        help="masks to draw of each (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers there")
    parser.add_argument("--picture", type=output_folder, metavar="DIR",
                        help="write a PNG of each mask there")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; UserError for a mask, grid, count or setting that cannot be."""
    grid, count = _checked(arguments)
    from mimkit.audit.mask import certify
    from mimkit.masks import MASKS

    make_masks = {text: _mask_maker(text, grid=grid) for text in arguments.mask or MASKS.names()}
    for make_mask in make_masks.values():
        make_mask(count)  # what cannot be is refused before anything is drawn
    certificates = [
        certify(
            make_mask,
            name=text,
            grid=grid,
            count=count,
            draws=arguments.draws,
            seed=arguments.seed,
            progress=partial(tqdm, desc=text, unit="mask", leave=False, delay=1, disable=None),
        )
        for text, make_mask in make_masks.items()
    ]
    print(_table(certificates))
    if arguments.json:
        _write_json(arguments.json, certificates)
    if arguments.picture:
        for certificate in certificates:
            mask = make_masks[certificate.mask](count)
            _save_picture(arguments.picture, certificate, mask, seed=arguments.seed)
    return 0


def _checked(arguments: argparse.Namespace) -> tuple["Grid", int]:
    """Grid and count; UserError for numbers out of range, in words of the command line."""
    rows, columns = arguments.grid
    if rows < 1 or columns < 1 or rows * columns < 2:
        raise UserError(f"--grid is {rows} {columns}; a mask needs at least 2 patches, set --grid "
                        "to rows and columns (14 14 is BEiT's)")  # fmt: skip
    check_range(arguments, draws=(1, 10**7), seed=(0, 2**63 - 1))
    count = arguments.count
    if count is None:
        from mimkit.masks import beits_share

        count = beits_share((rows, columns))
    if not 1 <= count < rows * columns:
        raise UserError(f"--count is {count}, but a grid of {rows}x{columns} has {rows * columns} "
                        f"patches; set --count to 1..{rows * columns - 1}")  # fmt: skip
    return (rows, columns), count


def _mask_maker(text: str, *, grid: "Grid") -> "MakeMask":
    from mimkit.build import make_part
    from mimkit.masks import MASKS, Mask

    config = parse_part(text)
    for key, flag in (("num_masked", "--count K"), ("grid", "--grid H W")):
        if key in config.settings:
            raise UserError(f"'{key}' in '{text}' is the same for every mask here; give {flag}")

    def make_mask(count: int) -> Mask:
        return make_part(MASKS, config, grid=grid, num_masked=count)

    return make_mask


def _table(certificates: "Sequence[MaskCertificate]") -> str:
    first = certificates[0]
    num_patches = first.grid[0] * first.grid[1]
    uniform = first.count / num_patches
    lines = [_COLUMNS, *(_row(certificate) for certificate in certificates)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "\n".join([
        f"{first.count} of {num_patches} patches, {first.grid[0]} x {first.grid[1]}; "
        f"{first.draws:,} draws of each mask",
        "",
        *("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
          for line in lines),
        "",
        # three standard deviations
        _LEGEND.format(precision=3 * (uniform * (1 - uniform) / first.draws) ** 0.5,
                       uniform=uniform),
    ])  # fmt: skip


def _row(certificate: "MaskCertificate") -> tuple[str, ...]:
    c = certificate
    cells = (c.min_cell, c.max_cell, c.corner, c.edge, c.centre)
    return (
        c.mask, f"{c.exact:.1%}", f"{c.mean_count:.2f}",
        *(f"{probability:.1%}" for probability in cells),
        f"{c.blocks:.2f}", f"{c.block_size:.1f}", f"{c.symmetric:.3f}", f"{c.us_per_mask:.0f}",
        f"{c.least_feasible}-{c.most_feasible}",
    )  # fmt: skip


def _write_json(path: Path, certificates: "Sequence[MaskCertificate]") -> None:
    from mimkit.files import write_text

    write_text(path, json.dumps([asdict(certificate) for certificate in certificates], indent=1))
    print(f"wrote {path}")


def _save_picture(folder: Path, certificate: "MaskCertificate", mask: "Mask", *, seed: int) -> None:
    from mimkit.audit.mask import draw_masks
    from mimkit.cli._audit._mask_picture import EXAMPLES, save_mask_picture

    rows, columns = certificate.grid
    name = re.sub(r"[^\w.=]+", "-", certificate.mask)
    path = folder / f"mask-{name}-{rows}x{columns}-{certificate.count}.png"
    examples = draw_masks(mask, range(EXAMPLES), grid=certificate.grid, seed=seed)
    save_mask_picture(path, certificate, examples)
    print(f"wrote {path}")
