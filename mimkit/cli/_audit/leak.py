"""`mimkit audit leak`: what pixels under a mask do to visible tokens, and how far a stem sees."""

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from mimkit.cli._arguments import check_range, output_file, output_folder
from mimkit.cli._audit import parse_part
from mimkit.cli._folder import Subparsers
from mimkit.errors import UserError

if TYPE_CHECKING:  # they are slow to import, and --help does not need them
    from torch import Tensor

    from mimkit.audit.leak import Leak
    from mimkit.models.stems import Stem

STEMS = (
    "linear", "linear_bn", "hmlp", "hmlp:norm=ln", "levit", "levit:norm=ln", "conv", "local",
)  # fmt: skip
_COLUMNS = ("stem", "mask at", "hidden", "moved", "mean", "max", "distance", "reach", "mode")
_LEGEND = """\
Only pixels under a {side} x {side} block of masked patches were changed, to those of other images
({batch} of {images} normalised together; the fewer, the more batch statistics move).
hidden: patches that hold the mask token. moved: share of the visible tokens that changed; mean,
max: by how much of their length, over all visible tokens; distance: of the farthest moved one from
the mask, in patches. reach: pixels beyond its patch that a token sees, declared / measured by its
derivative. mode: eval, or train with what batch norms normalise by (stem.statistics)."""
_EPILOG = """
A stem may have settings: --stem hmlp:norm=ln levit:activation=hardswish

examples:
  tools/audit.py leak                                   every stem, placement and mode
  tools/audit.py leak --images photographs --batch 32   as in training, where the batch is large
  tools/audit.py leak --stem levit --mask-at after_stem dilated before_stem:filler=mean
  tools/audit.py leak --json leak.json --picture pictures
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "leak",
        help="which visible tokens see pixels under the mask, and by how much",
        description="Change only pixels under a mask and measure what moves.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stem", nargs="+", default=STEMS, metavar="NAME",
                        help="which (default: the paper's and Xiao's)")  # fmt: skip
    parser.add_argument("--mask-at", nargs="+", metavar="NAME",
                        help="placements of the mask (default: every one)")  # fmt: skip
    parser.add_argument("--width", type=int, default=384, metavar="D",
                        help="of the tokens (default: %(default)s, ViT-S)")  # fmt: skip
    parser.add_argument("--image", type=int, default=224, metavar="PIXELS",
                        help="side of the images (default: %(default)s)")  # fmt: skip
    parser.add_argument("--patch", type=int, default=16, metavar="PIXELS",
                        help="side of a patch (default: %(default)s)")  # fmt: skip
    parser.add_argument("--images", choices=("noise", "photographs"), default="noise",
                        help="normal noise, the same everywhere, or the embedded photographs "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--batch", type=int, default=4, metavar="B",
                        help="images normalised together (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers there")
    parser.add_argument("--picture", type=output_folder, metavar="DIR",
                        help="write a PNG of what each stem sees there")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; UserError for a stem, placement or size that cannot be."""
    from mimkit.audit.leak import Leak, block_mask, leaks
    from mimkit.build import make_part
    from mimkit.models.mask_at import MASK_AT

    check_range(arguments, width=(4, 8192), image=(8, 4096), patch=(1, 256), batch=(2, 4096))
    stems = {text: _stem(text, arguments) for text in arguments.stem}
    placements = {
        text: make_part(MASK_AT, parse_part(text)) for text in arguments.mask_at or MASK_AT.names()
    }
    grids = {stem.grid(arguments.image, arguments.image) for stem in stems.values()}
    (grid,) = grids
    if min(grid) < 3:
        raise UserError(
            f"--image {arguments.image} makes {grid[0]} x {grid[1]} patches; the audit needs 3 x 3 "
            f"at least: set --image to {3 * arguments.patch} or more"
        )
    image_BCHW, other_BCHW = _images(arguments).chunk(2)
    mask_BN = block_mask(grid, batch=len(image_BCHW))
    found: list[Leak] = []
    pairs = [(stem, placement) for stem in stems for placement in placements]
    for text, placement in tqdm(pairs, desc="leak", unit="pair", leave=False, disable=None):
        found += leaks(stems[text], placements[placement], name=text, placement=placement,
                       image_BCHW=image_BCHW, other_BCHW=other_BCHW, mask_BN=mask_BN)  # fmt: skip
    masked = int(mask_BN[0].sum())
    print(f"{masked} of {mask_BN.shape[1]} patches masked, {grid[0]} x {grid[1]}; width "
          f"{arguments.width}\n\n{_table(found)}\n")  # fmt: skip
    print(_LEGEND.format(side=round(masked**0.5), batch=arguments.batch, images=arguments.images))
    setting = {key: getattr(arguments, key)
               for key in ("width", "image", "patch", "batch", "images")}  # fmt: skip
    if arguments.json:
        from mimkit.files import write_text

        write_text(arguments.json, json.dumps([asdict(leak) | setting for leak in found], indent=1))
        print(f"wrote {arguments.json}")
    for text, stem in stems.items() if arguments.picture else ():
        _save_picture(arguments.picture, text, stem)
    return 0


def _stem(text: str, arguments: argparse.Namespace) -> "Stem":
    import torch

    from mimkit.build import make_part
    from mimkit.models.init import initialise_stem
    from mimkit.models.stems import STEMS as REGISTRY

    part = parse_part(text)
    for key, flag in (("width", "--width D"), ("patch_size", "--patch PIXELS")):
        if key in part.settings:
            raise UserError(f"'{key}' in '{text}' is the same for every stem here; give {flag}")
    if "statistics" in part.settings:
        raise UserError(f"'statistics' in '{text}': every setting of it is measured; leave it out")
    with torch.random.fork_rng():  # layers draw initial weights, which are replaced at once
        stem = make_part(REGISTRY, part, width=arguments.width, patch_size=arguments.patch)
    initialise_stem(stem, seed=0)
    return stem


def _images(arguments: argparse.Namespace) -> "Tensor":
    """Twice the batch."""
    num, side = 2 * arguments.batch, arguments.image
    if arguments.images == "noise":
        from mimkit.audit.leak import noise

        return noise(num, side=side)
    from mimkit.config import DataConfig
    from mimkit.encoder_io import example_images

    # the tokenizer's view is not used: any size will do
    return example_images(DataConfig(image_size=side, token_size=side), num=num)


def _table(found: "list[Leak]") -> str:
    rows = [_COLUMNS, *_rows(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join([*map(str.ljust, row[:2], widths[:2]), *map(str.rjust, row[2:-1], widths[2:-1]),
                   row[-1]])
        for row in rows
    )  # fmt: skip


def _rows(found: "list[Leak]") -> list[tuple[str, ...]]:
    """Modes of a stem and placement that give the same numbers share a line."""
    modes: dict[tuple[str, ...], list[str]] = {}
    for leak in found:
        numbers = (
            leak.stem, leak.mask_at, f"{leak.hidden:.1%}", f"{leak.visible_moved:.1%}",
            f"{leak.mean_relative:.2%}", f"{leak.max_relative:.1%}", f"{leak.farthest}",
            f"{leak.reach_declared}/{leak.reach_measured}",
        )  # fmt: skip
        statistics = f" {leak.bn}" if leak.bn and leak.mode == "train" else ""
        modes.setdefault(numbers, []).append(leak.mode + statistics)
    return [(*numbers, ", ".join(names)) for numbers, names in modes.items()]


def _save_picture(folder: Path, text: str, stem: "Stem") -> None:
    from mimkit.cli._audit._reach_picture import save_reach_picture

    name = re.sub(r"[^\w.=]+", "-", text)
    path = folder / f"reach-{name}.png"
    save_reach_picture(path, stem, name=text)
    print(f"wrote {path}")
