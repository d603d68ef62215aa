"""Make an encoder of mimkit from the weights of BEiT, MAE, DeiT-III, DINOv2, timm or transformers.

  mimkit import_weights beit_base_patch16_224_pt22k.pth encoder.safetensors
  mimkit import_weights model.safetensors encoder.safetensors --heads 6

OUT is what `mimkit export --format safetensors` writes: mimkit.load_encoder(OUT) opens it. It is
loaded back and compared with the imported encoder before it appears. Which names the weights have
is recognised and said, and so is every weight that was not used; below 95 % nothing is written and
the exit code is 2.

FILE is read as data: nothing in a .pth is executed, and one that asks for more than tensors is
refused. No file of weights says on which pixels it was trained, so mean and std are the usual ones
of the scheme unless --mean and --std say others.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimkit.cli._arguments import parse_size
from mimkit.errors import UserError

if TYPE_CHECKING:  # slow to import, and --help does not need it
    from mimkit.export import ExportReport
    from mimkit.importing import Imported

_IMAGES = 2  # of noise, for the comparison with what was loaded back
_SHOWN = 4  # names a reason


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.out.exists() and args.file.exists() and args.out.samefile(args.file):
        raise UserError(f"{args.out} is the file that is read; name another to write")
    from mimkit.export import EXPORTERS
    from mimkit.files import sha256
    from mimkit.importing import import_weights

    EXPORTERS["safetensors"]().check(args.out, overwrite=args.overwrite, has_card=False)

    imported = import_weights(
        args.file,
        scheme=args.scheme,
        heads=args.heads,
        image_size=parse_size(args.image_size),
        mean=args.mean and tuple(args.mean),
        std=args.std and tuple(args.std),
    )
    file = args.file / "model.safetensors" if args.file.is_dir() else args.file
    said = {"imported_from": file.name, "imported_sha256": sha256(file)}
    report = _write(imported, args.out, said, overwrite=args.overwrite)
    print("\n".join([*_about(imported), *_written(report)]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mimkit import_weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", type=Path, help="safetensors, a .pth, or a folder with model.safetensors"
    )
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    parser.add_argument("--scheme", help="how the weights are named (default: recognised)")
    parser.add_argument(
        "--heads", type=int, help="attention heads (default: the bias's, or usual for the width)"
    )
    parser.add_argument(
        "--image-size",
        metavar="N or HxW",
        help="pixels the positions belong to (default: the square they make)",
    )
    for name in ("mean", "std"):
        parser.add_argument(
            f"--{name}",
            type=float,
            nargs=3,
            metavar=("R", "G", "B"),
            help=f"{name} of pixels in [0, 1] (default: the scheme's)",
        )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace OUT if it exists (default: refuse)"
    )
    return parser


def _write(
    imported: "Imported", out: Path, said: Mapping[str, str], *, overwrite: bool
) -> "ExportReport":
    import torch

    from mimkit.export import EXPORTERS

    encoder = imported.encoder
    sides = [side * encoder.stem.patch_size for side in encoder.encoder.grid]
    noise = torch.randn(_IMAGES, 3, *sides, generator=torch.Generator().manual_seed(0))
    return EXPORTERS["safetensors"]().export(
        encoder,
        out,
        image_BCHW=noise,
        mean=imported.mean,
        std=imported.std,
        metadata={
            **said,
            "scheme": imported.scheme,
            "coverage": f"{imported.coverage.share:.4f}",
        },
        overwrite=overwrite,
    )


def _about(imported: "Imported") -> Iterator[str]:
    from mimkit.importing import SCHEMES

    encoder, coverage = imported.encoder.encoder, imported.coverage
    around = [f"under '{imported.wrapper}'"] if imported.wrapper else []
    around += [f"behind '{imported.prefix}'"] if imported.prefix else []
    yield f"scheme: {imported.scheme}, {SCHEMES[imported.scheme].what}" + "".join(
        f", {words}" for words in around
    )
    yield (
        f"encoder: width {encoder.width}, {encoder.heads} heads, {encoder.depth} blocks of "
        f"{encoder.branches} branch{'es' if encoder.branches > 1 else ''}, stem "
        f"{imported.encoder.stem.name}, patches of {imported.encoder.stem.patch_size} pixels, "
        f"{encoder.grid[0]}x{encoder.grid[1]} of them, positions {encoder.positions}, "
        f"qkv_bias {encoder.qkv_bias}, LayerScale {'yes' if encoder.layer_scale else 'no'}"
    )
    theirs = len(coverage.used) + len(coverage.unused)
    ours = len(coverage.filled) + len(coverage.unfilled)
    yield (
        f"coverage: {coverage.share:.1%}; used {len(coverage.used)} of {theirs} weights of theirs, "
        f"filled {len(coverage.filled)} of {ours} of ours"
    )
    yield from (f"  NOT USED: {name}" for name in coverage.unused)
    yield from (
        f"left out ({why}): {', '.join(names)}" for why, names in _reasons(coverage.left_out)
    )
    said = "as given" if imported.pixels_given else "the scheme's default; --mean, --std for others"
    yield f"pixels: mean {list(imported.mean)}, std {list(imported.std)} ({said})"
    yield from (f"note: {note}" for note in imported.notes)


def _reasons(left_out: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Each reason with its names, few of them: a decoder has hundreds."""
    for why in dict.fromkeys(left_out.values()):
        names = [name for name, reason in left_out.items() if reason == why]
        more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        yield why, names[:_SHOWN] + more


def _written(report: "ExportReport") -> Iterator[str]:
    yield (
        f"wrote {report.path}: {report.parameters / 1e6:.2f} M parameters, "
        f"{report.bytes / 2**20:.1f} MiB; loaded back, tokens differ by at most "
        f"{report.max_difference:.1e}"
    )
    yield f"sha256: {report.files[report.path.name]}"
    yield f'use it: mimkit.load_encoder("{report.path}")'
