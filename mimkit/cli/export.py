"""Write a run's encoder for another library, and prove that it gives the same features there.

  python tools/export.py runs/latest --format timm encoder.safetensors
  python tools/export.py imported.safetensors --format onnx encoder.onnx

The second takes what import_weights, or --format safetensors, wrote.

The formats:

  safetensors  mimkit's own: mimkit.load_encoder("encoder.safetensors")
  timm         timm's VisionTransformer, or Beit for relative positions, as one safetensors file
  hf           a folder for HuggingFace's transformers: BeitModel, ViTModel, or a modelling file
  onnx         ONNX, any batch, one size of images
  pt2          torch.export's archive, any batch, one size of images

The export is loaded back by the other library and run on the same images; if any number differs by
more than 1e-5 (ONNX 1e-4), nothing is written and the exit code is 2. A model card with the proof
is written beside the file (OUT.md), or into the folder as README.md.

  python tools/export.py runs/latest --format onnx encoder.onnx --image-size 384
  python tools/export.py runs/latest --format hf beit --with-head --fold --licence apache-2.0

  python tools/export.py runs/latest --format timm --regroup 2 parallel.safetensors

--regroup N writes a sequential encoder as a parallel one: N consecutive blocks become the branches
of one block, with their weights as they are. That is another function: its tokens differ from the
trained encoder's. A table says by how much after each block, and the file's metadata hold it; the
proof then compares the file with the regrouped encoder.
"""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimkit.cli._arguments import parse_size

if TYPE_CHECKING:
    from mimkit.export import ExportReport
    from mimkit.models.regroup import Movement


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    image_size = parse_size(arguments.image_size)
    from mimkit.encoder_export import export_run

    done = export_run(
        arguments.run,
        format_name=arguments.format,
        out=arguments.out,
        branches=arguments.regroup,
        image_size=image_size,
        fold=arguments.fold,
        with_head=arguments.with_head,
        licence=arguments.licence,
        weights=arguments.weights,
        overwrite=arguments.overwrite,
    )
    if done.moved:
        print(_table(done.moved, branches=arguments.regroup, images=done.report.images))
    print(_said(done.report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mimkit export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path,
        help="a run folder (of a finetuning: its best weights), a checkpoint, or an encoder file",
    )  # fmt: skip
    parser.add_argument("out", type=Path, help="the file or folder to write")
    parser.add_argument("--format", default="timm", help="the format (default: timm)")
    parser.add_argument(
        "--image-size",
        metavar="N or HxW",
        help="interpolate positions to this size in pixels (default: the run's)",
    )
    parser.add_argument(
        "--fold", action="store_true", help="put the stem's batch norms into its convolutions"
    )
    parser.add_argument(
        "--with-head",
        action="store_true",
        help="of a finetuning the classifier too (not safetensors); of a pretraining the mask "
        "token and the head (format hf, linear stems)",
    )
    parser.add_argument(
        "--weights",
        choices=("best", "trained", "average"),
        default="best",
        help="average: of the weights, where the run keeps one (train.ema); best: that where there "
        "is one, else the trained ones (default: best)",
    )
    parser.add_argument(
        "--licence", help="of the weights, for the card (default: what a file says, else unknown)"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the file OUT, or the folder if it is an export (default: refuse)",
    )
    parser.add_argument(
        "--regroup",
        type=int,
        metavar="N",
        help="make N consecutive blocks the branches of one; N divides the depth (default: do not)",
    )
    return parser


def _said(report: "ExportReport") -> str:
    sizes = ", ".join(f"{found.height}x{found.width}" for found in report.comparisons)
    return (
        f"wrote {report.path}: {report.architecture}, {report.parameters / 1e6:.2f} M parameters, "
        f"{report.bytes / 2**20:.1f} MiB\n"
        f"proof: on {report.images} images, at {sizes} pixels, outputs differ by at most "
        f"{report.max_difference:.1e} (allowed {report.tolerance:.0e})\n"
        f"one image: {report.latency.loaded:.1f} ms, in mimkit {report.latency.source:.1f} ms\n"
        f"load it:\n{textwrap.indent(report.usage, '  ')}"
    )


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
