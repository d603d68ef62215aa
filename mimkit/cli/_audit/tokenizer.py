"""`mimkit audit tokenizer`: use of the words, their stability, their place, and reconstruction."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from mimkit.cli._arguments import output_file, output_folder
from mimkit.cli._audit import parse_part
from mimkit.cli._folder import Subparsers
from mimkit.errors import UserError

if TYPE_CHECKING:  # they are slow to import, and --help does not need them
    from mimkit.audit.tokenizer import Reconstruction, TokenizerHealth
    from mimkit.batch import Batch
    from mimkit.config import DataConfig
    from mimkit.data.loader import BatchLoader
    from mimkit.data.sources import Source
    from mimkit.tokenizers import VisualTokenizer

_SHOWN = 8  # images in the picture
_SIZES = {"embedded": 64, "shards": 112}  # the default job's, and BEiT's
_EPILOG = """
A tokenizer has settings: --tokenizer dalle:path=dalle.safetensors,decoder=decoder.pkl

examples:
  tools/audit.py tokenizer                               the embedded one, on embedded photographs
  tools/audit.py tokenizer --tokenizer dvae:path=runs/my-tokenizer/tokenizer.safetensors \\
      --shards 'shards/val/*.tar' --images 256 --json health.json --picture pictures

Tokenizers of patches of other sizes, at the same tokens per pixel and on the same pixels:
  tools/audit.py tokenizer --tokenizer dvae:path=... --shards cifar10/test --size 64 --redraw-at 32
  tools/audit.py tokenizer --tokenizer vqvae.py:VqVae:path=... --shards cifar10/test --size 32 \\
      --redraw-at 32

The exit code is 1 where the targets are as good as constant or lie at the wrong patches.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "tokenizer",
        help="use and stability of its words, whether both views agree, reconstruction",
        description="Measure a tokenizer on the views that training would give it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokenizer", default="dvae:path=embedded", metavar="NAME:KEY=VALUE",
                        help="which (default: %(default)s)")  # fmt: skip
    parser.add_argument("--shards", metavar="PATTERN",
                        help="images to look at (default: the embedded held-out ones)")  # fmt: skip
    parser.add_argument("--images", type=int, default=64, metavar="N",
                        help="how many (default: %(default)s)")  # fmt: skip
    parser.add_argument("--size", type=int, metavar="PIXELS",
                        help="side of the token view (default: 64 for embedded images, BEiT's 112 "
                        "for shards); the encoder's view has twice as many")  # fmt: skip
    parser.add_argument("--redraw-at", type=int, metavar="PIXELS",
                        help="measure reconstruction on all images, whole, of this side: resized "
                        "to --size, redrawn, resized back (default: on the above)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of crops and flips (default: 0)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers there")
    parser.add_argument("--picture", type=output_folder, metavar="DIR",
                        help="write PNGs there: views, redrawn, words as colours; how often each "
                        "word occurs")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Prints verdict and table; 1 for a dead or misplaced tokenizer, UserError for bad input."""
    _check(arguments)
    tokenizer = _tokenizer(arguments.tokenizer)
    size = arguments.size or _SIZES["shards" if arguments.shards else "embedded"]
    _check_grid(tokenizer, size)
    if arguments.redraw_at and (tokenizer.vocabulary is None or not tokenizer.can_decode):
        raise UserError(f"--redraw-at measures images that are redrawn from words, and "
                        f"{arguments.tokenizer} redraws none; leave it out")  # fmt: skip
    from mimkit.audit.tokenizer import measure, reconstruction
    from mimkit.audit.tokenizer_verdict import verdict
    from mimkit.cli._audit._tokenizer_table import table

    views = _views(arguments, size)
    health = measure(tokenizer, views, name=arguments.tokenizer)
    whole = views if arguments.redraw_at is None else _whole_images(arguments)
    bar = tqdm(whole, desc="redrawing", leave=False, disable=None)
    drawn = reconstruction(tokenizer, bar, size=size if arguments.redraw_at else None)
    word, reason = verdict(health)
    print(f"{health.tokenizer}: {word}" + (f": {reason}" if reason else ""))
    print(f"\n{_heading(arguments, size)}\n\n{table(health, drawn)}")
    if drawn and arguments.redraw_at:
        print(f"\nredrawn: whole images of {arguments.redraw_at} pixels, as {size} x {size}")
    if arguments.json:
        _write_json(arguments.json, health, drawn, word)
    if arguments.picture:
        _save_pictures(arguments.picture, tokenizer, views, name=arguments.tokenizer)
    return 1 if word in ("dead", "misplaced") else 0


def _check(arguments: argparse.Namespace) -> None:
    for flag, value, least in (("--images", arguments.images, 1), ("--seed", arguments.seed, 0),
                               ("--size", arguments.size, 8),
                               ("--redraw-at", arguments.redraw_at, 8)):  # fmt: skip
        if value is not None and value < least:
            raise UserError(f"{flag} is {value}; set it to {least} or more")


def _tokenizer(text: str) -> "VisualTokenizer":
    from mimkit.build import make_part
    from mimkit.tokenizers import TOKENIZERS

    return make_part(TOKENIZERS, parse_part(text)).eval()


def _check_grid(tokenizer: "VisualTokenizer", size: int) -> None:
    try:
        grid = tokenizer.grid(size, size)
    except UserError as error:
        raise UserError(f"--size {size} (a run's data.token_size): {error}") from error
    if min(grid) < 3:
        raise UserError(
            f"--size {size} makes {grid[0]} x {grid[1]} patches; the audit compares each with its "
            f"neighbours and needs 3 x 3 at least: set --size to {3 * size // min(grid)} or more"
        )


def _heading(arguments: argparse.Namespace, size: int) -> str:
    origin = arguments.shards or "the embedded held-out photographs"
    return f"{arguments.images} training views of {size} pixels, of {origin}"


def _views(arguments: argparse.Namespace, size: int) -> "list[Batch]":
    from mimkit.audit.of_run import training_views
    from mimkit.config import DataConfig

    data = DataConfig(image_size=2 * size, token_size=size)
    if arguments.shards is None:  # small crops already, see configs/default.yaml
        data = data.model_copy(update={"crop_scale": (0.2, 1.0)})
    source = _source(arguments, data)
    return training_views(source, data, seed=arguments.seed, images=arguments.images)


def _source(arguments: argparse.Namespace, data: "DataConfig") -> "Source":
    from mimkit import build

    return build.build_source(data, arguments.shards or "embedded", split="heldout")


def _whole_images(arguments: argparse.Namespace) -> "BatchLoader":
    from mimkit import build
    from mimkit.config import DataConfig
    from mimkit.data.loader import eval_loader

    data = DataConfig(token_size=arguments.redraw_at)
    return eval_loader(source=_source(arguments, data), view=build.build_probe_view(data, "tokens"),
                       mask=None, seed=0, batch_size=64, rank=0, world=1, workers=0)  # fmt: skip


def _write_json(
    path: Path, health: "TokenizerHealth", drawn: "Reconstruction | None", verdict: str
) -> None:
    from mimkit.files import write_text

    reconstruction = None if drawn is None else asdict(drawn)
    found = {"verdict": verdict, **asdict(health), "reconstruction": reconstruction}
    write_text(path, json.dumps(found, indent=1))
    print(f"wrote {path}")


def _save_pictures(
    folder: Path, tokenizer: "VisualTokenizer", views: "Sequence[Batch]", *, name: str
) -> None:
    from mimkit.audit._tokenizer_picture import tokenizer_picture
    from mimkit.files import atomic_file

    stem = re.sub(r"[^\w.=]+", "-", name)
    path = folder / f"tokenizer-{stem}.png"
    with atomic_file(path) as temporary:
        picture = tokenizer_picture(tokenizer, views[0].token_view_BChw[:_SHOWN])
        picture.save(temporary, "PNG")
    print(f"wrote {path}")
    if tokenizer.vocabulary is not None:
        from mimkit.cli._audit._word_histogram import save_word_histogram

        path = folder / f"words-{stem}.png"
        save_word_histogram(path, tokenizer, views, name=name)
        print(f"wrote {path}")
