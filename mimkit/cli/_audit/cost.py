"""`mimkit audit cost`: parameters, arithmetic, memory and time of stems and parallel models."""

import argparse
import dataclasses
import json
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tqdm import tqdm

from mimkit.cli._arguments import check_range, output_file
from mimkit.cli._audit import parse_part
from mimkit.cli._folder import Subparsers
from mimkit.errors import UserError

if TYPE_CHECKING:  # they are slow to import, and --help does not need them
    import torch

    from mimkit.audit.cost import Cost, Milliseconds
    from mimkit.batch import Grid
    from mimkit.config import EncoderConfig
    from mimkit.models.encoder import Encoder, ImageEncoder
    from mimkit.models.stems import Stem


class _Row(NamedTuple):
    stem: str
    model: str
    timed: bool = True


_STEMS = (
    "linear", "linear_bn", "linear:gelu=true", "linear_bn:gelu=true", "hmlp", "hmlp:norm=ln",
    "levit", "levit:norm=ln", "conv:plan=18gf", "local",
)  # fmt: skip
# Table 7's stems and its equal-FLOP control; twelve blocks in parallel; the models of Tables 1, 3.
_DEFAULT = (
    *(_Row(stem, "B12") for stem in _STEMS), _Row("linear", "B13"),
    *(_Row("linear", model) for model in ("B6x2", "B4x3", "B3x4")),
    *(_Row("linear", model, timed=False)
      for model in ("Ti12", "S12", "S48", "S24x2", "L24", "B36", "B18x2")),
)  # fmt: skip
# The paper's GFLOPs (Tables 1, 3, 7) and millions of parameters (Tables 1, 3), 224 pixels.
_PAPER_GFLOPS = {
    ("linear", "B12"): 17.58, ("linear_bn", "B12"): 17.58, ("linear:gelu=true", "B12"): 17.58,
    ("linear_bn:gelu=true", "B12"): 17.58, ("linear", "B13"): 19.04, ("levit", "B12"): 19.07,
    ("levit:norm=ln", "B12"): 19.07, ("local", "B12"): 19.12, ("hmlp", "B12"): 17.73,
    ("hmlp:norm=ln", "B12"): 17.73, ("linear", "Ti12"): 1.3, ("linear", "S12"): 4.6,
    ("linear", "L24"): 61.6, ("linear", "S48"): 18.3, ("linear", "S24x2"): 18.3,
    ("linear", "B36"): 52.5, ("linear", "B18x2"): 52.5,
}  # fmt: skip
_PAPER_PARAMS = {
    ("linear", "Ti12"): 5.7, ("linear", "S12"): 22.1, ("linear", "B12"): 86.6,
    ("linear", "L24"): 304.4, ("linear", "S48"): 85.9, ("linear", "S24x2"): 85.9,
    ("linear", "B36"): 256.7, ("linear", "B18x2"): 256.7,
}  # fmt: skip
_COLUMNS = ("stem", "model", "params M", "paper's", "GFLOPs", "paper's", "by torch", "of stem",
            "kept MiB", "ms fwd", "ms train", "of stem")  # fmt: skip
_LEGEND = """\

Of one image through a classifier of 1,000 classes. GFLOPs: multiply-adds counted once and 5 for
each normalised element, which gives the paper's column; by torch: its count, a multiply-add being
two, norms nothing. of stem: its share of the GFLOPs, and of the training time. kept: for backward,
in float32, weights apart.
{timing}{differ}"""
_EPILOG = """
A stem may have settings: --stem hmlp:norm=ln conv:plan=4gf
A size is a width, a depth and branches: B12, S36, B18x2 (18 blocks of two branches)

examples:
  tools/audit.py cost                                   the paper's table, beside its numbers
  tools/audit.py cost --stem linear hmlp --size S12 S6x2 --image 384
  tools/audit.py cost --rounds 0 --json cost.json       count only, without timing
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "cost",
        help="parameters, FLOPs, memory and time of stems and parallel models",
        description="Count and time stems and models, beside the paper's numbers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stem", nargs="+", metavar="NAME",
                        help="which (default: the paper's, and Xiao's)")  # fmt: skip
    parser.add_argument("--size", nargs="+", metavar="SIZE",
                        help="models to put them in (default: B12)")  # fmt: skip
    parser.add_argument("--image", type=int, default=224, metavar="PIXELS",
                        help="side of the images (default: %(default)s)")  # fmt: skip
    parser.add_argument("--patch", type=int, default=16, metavar="PIXELS",
                        help="side of a patch (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=2, metavar="R",
                        help="of timing, 0 for none (default: %(default)s)")  # fmt: skip
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto",
                        help="of the timing (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers there")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; UserError for a stem or size that cannot be."""
    check_range(arguments, rounds=(0, 1000), image=(1, 4096), patch=(1, 256))
    from mimkit.audit.cost import cost

    rows = _rows(arguments)
    counted = tqdm(rows, desc="counting", unit="model", leave=False, delay=2, disable=None)
    costs = [cost(_model(row, arguments), stem=row.stem, name=row.model) for row in counted]
    if arguments.rounds:
        costs = _timed(rows, costs, arguments)
    standard = (arguments.image, arguments.patch) == (224, 16)
    print(f"{arguments.image} pixels, patches of {arguments.patch}\n")
    print(_table(costs, standard=standard))
    print(_legend(costs, arguments, standard=standard))
    if arguments.json:
        from mimkit.files import write_text

        setting = {key: getattr(arguments, key) for key in ("image", "patch", "rounds")}
        setting["precision"] = "bf16" if _bf16(arguments) else "fp32"
        text = json.dumps([dataclasses.asdict(found) | setting for found in costs], indent=1)
        write_text(arguments.json, text)
        print(f"wrote {arguments.json}")
    return 0


def _rows(arguments: argparse.Namespace) -> list[_Row]:
    if arguments.stem is None and arguments.size is None:
        return list(_DEFAULT)
    return [
        _Row(stem, _full_name(model))
        for model in arguments.size or ["B12"]
        for stem in arguments.stem or _STEMS
    ]


def _full_name(text: str) -> str:
    """B -> B12, B18x1 -> B18: the spelling of the tables."""
    from mimkit.models.sizes import SIZES

    named = _size(text)
    branches = f"x{named.branches}" if named.branches > 1 else ""
    return f"{named.size}{named.depth or SIZES[named.size].depth}{branches}"


def _size(text: str) -> "EncoderConfig":
    from pydantic import ValidationError

    from mimkit.config import EncoderConfig

    try:
        return EncoderConfig.model_validate({"size": text})  # B18x2 is written out there
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"--size {text}: {problem}") from error


def _model(row: _Row, arguments: argparse.Namespace) -> "ImageEncoder":
    """On the meta device, which holds no numbers: for counting."""
    import torch

    from mimkit.models.encoder import ImageEncoder

    with torch.device("meta"):
        return ImageEncoder(_stem(row, arguments), _encoder(row, arguments))


def _stem(row: _Row, arguments: argparse.Namespace) -> "Stem":
    from mimkit.build import make_part
    from mimkit.models.sizes import SIZES
    from mimkit.models.stems import STEMS

    width = SIZES[_size(row.model).size].width
    return make_part(STEMS, parse_part(row.stem), width=width, patch_size=arguments.patch)


def _encoder(row: _Row, arguments: argparse.Namespace) -> "Encoder":
    """Of a plain ViT, as in the paper's tables: full qkv bias, no LayerScale."""
    from mimkit.models.encoder import Encoder
    from mimkit.models.sizes import SIZES

    named = _size(row.model)
    size = SIZES[named.size]
    return Encoder(
        width=size.width, heads=size.heads, depth=named.depth or size.depth,
        branches=named.branches, grid=_grid(arguments), layer_scale=None, qkv_bias="qkv",
    )  # fmt: skip


def _grid(arguments: argparse.Namespace) -> "Grid":
    side, left = divmod(arguments.image, arguments.patch)
    if left or not side:
        raise UserError(
            f"--image {arguments.image} does not divide into patches of {arguments.patch}; set "
            f"--image to a multiple of {arguments.patch}"
        )
    return side, side


def _timed(rows: list[_Row], costs: "list[Cost]", arguments: argparse.Namespace) -> "list[Cost]":
    """Stems and encoders on their own, each once: their sum is the row's time."""
    from mimkit.audit.cost import measure

    parts: dict[str, tuple[torch.nn.Module, torch.Tensor]] = {}
    for row in (row for row in rows if row.timed):
        stem_key, encoder_key = _keys(row)
        if stem_key not in parts:
            parts[stem_key] = _stem(row, arguments), _images(arguments)
        if encoder_key not in parts:
            encoder = _encoder(row, arguments)
            parts[encoder_key] = encoder, _tokens(encoder)
    took = measure(
        parts,
        rounds=arguments.rounds,
        bf16=_bf16(arguments),
        progress=partial(tqdm, desc="timing", unit="round", leave=False, disable=None),
    )
    return [
        _with_time(c, row, took) if row.timed else c for c, row in zip(costs, rows, strict=True)
    ]


def _bf16(arguments: argparse.Namespace) -> bool:
    from mimkit.build import use_bf16
    from mimkit.config import EngineConfig

    return use_bf16(EngineConfig(precision=arguments.precision))


def _keys(row: _Row) -> tuple[str, str]:
    return f"stem {row.stem} {row.model.rstrip('0123456789x')}", f"encoder {row.model}"


def _images(arguments: argparse.Namespace) -> "torch.Tensor":
    """Two, of noise."""
    import torch

    side = arguments.image
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def _tokens(encoder: "Encoder") -> "torch.Tensor":
    """Of two images; they want a gradient, as a stem's do."""
    import torch

    shape = (2, encoder.grid[0] * encoder.grid[1], encoder.width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _with_time(cost: "Cost", row: _Row, took: "dict[str, Milliseconds]") -> "Cost":
    stem, encoder = (took[key] for key in _keys(row))
    train = stem.train + encoder.train
    return dataclasses.replace(
        cost,
        ms_forward=stem.forward + encoder.forward,
        ms_train=train,
        stem_time_share=stem.train / train,
    )


def _table(costs: "list[Cost]", *, standard: bool) -> str:
    rows = [_COLUMNS, *(_line(cost, standard=standard) for cost in costs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join([*map(str.ljust, row[:2], widths[:2]), *map(str.rjust, row[2:], widths[2:])])
        for row in rows
    )


def _line(cost: "Cost", *, standard: bool) -> tuple[str, ...]:
    key = (cost.stem, cost.model)
    params, gflops = (table.get(key) if standard else None
                      for table in (_PAPER_PARAMS, _PAPER_GFLOPS))  # fmt: skip
    return (
        cost.stem, cost.model, f"{cost.params / 1e6:.2f}", f"{params or ''}",
        f"{cost.gflops_paper:.2f}", f"{gflops or ''}", f"{cost.gflops:.2f}",
        f"{cost.stem_share:.1%}", f"{cost.activations_mib:.1f}",
        *(f"{ms:.1f}" if ms is not None else "" for ms in (cost.ms_forward, cost.ms_train)),
        f"{cost.stem_time_share:.1%}" if cost.stem_time_share is not None else "",
    )  # fmt: skip


def _legend(costs: "list[Cost]", arguments: argparse.Namespace, *, standard: bool) -> str:
    timing = ""
    if arguments.rounds:
        timing = (
            f"ms: process time of one thread in {'bf16' if _bf16(arguments) else 'fp32'}, median "
            f"of {arguments.rounds} rounds; stem and encoder\nwere timed on their own.\n"
        )
    return _LEGEND.format(timing=timing, differ=_differences(costs) if standard else "")


def _differences(costs: "list[Cost]") -> str:
    """Where the paper's figure is not ours to the digits that it prints."""
    lines, compared = [], 0
    for cost in costs:
        key = (cost.stem, cost.model)
        compared += (key in _PAPER_GFLOPS) + (key in _PAPER_PARAMS)
        for what, ours, table in (("GFLOPs", cost.gflops_paper, _PAPER_GFLOPS),
                                  ("M parameters", cost.params / 1e6, _PAPER_PARAMS)):  # fmt: skip
            if key in table and f"{ours:.{_digits(table[key])}f}" != f"{table[key]}":
                lines.append(
                    f"  {cost.stem} {cost.model}: {ours:.3f} {what}, the paper has {table[key]}"
                )
    if not compared:
        return "The paper has no figures for these."
    if not lines:
        return (
            f"What the paper prints of these ({compared} figures) is reproduced to its last digit."
        )
    return "\n".join(["Not as in the paper:", *lines])


def _digits(published: float) -> int:
    return len(f"{published}".partition(".")[2])
