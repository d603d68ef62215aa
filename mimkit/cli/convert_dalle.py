"""Turn DALL-E's published weights into safetensors that `tokenizer=dalle` reads.

  mimkit convert_dalle encoder.pkl dalle.safetensors
  mimkit convert_dalle dalle_encoder.pth dalle.safetensors             OpenMMLab's copy
  mimkit convert_dalle --download encoder dalle.safetensors            fetches OpenAI's first

The pickle is read as data: it is never executed, and one that asks for anything but DALL-E's
modules and tensors is refused. For an encoder, the share of tokens that bf16 and fp16 change is
measured on photographs of the embedded data set.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from mimkit.errors import UserError

if TYPE_CHECKING:  # slow to import, and --help does not need it
    from torch import Tensor

_PHOTOGRAPHS = 8  # at 112 pixels an encoding takes 26 G multiply-adds, about 1.5 s on two cores


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if (args.src is None) == (args.download is None):
        raise UserError(
            "give one source: mimkit convert_dalle encoder.pkl OUT.safetensors, or "
            "mimkit convert_dalle --download encoder OUT.safetensors"
        )
    if args.out.suffix != ".safetensors":
        raise UserError(f"OUT is '{args.out}', but safetensors are written: end it in .safetensors")
    from mimkit.export._place import check_file

    check_file(args.out, overwrite=args.overwrite, has_card=False)
    source = args.src or _downloaded(args.download, args.out)
    from mimkit.tokenizers._dalle_file import convert_dalle

    weights = convert_dalle(source, args.out)
    print(
        f"wrote {args.out}: DALL-E's {weights.part}, width {weights.width}, "
        f"{weights.blocks} blocks a group, {weights.vocabulary} words; "
        f"{weights.num_parameters / 1e6:.2f} M parameters in fp32, "
        f"{args.out.stat().st_size / 2**20:.1f} MiB\nsha256 of the weights: {weights.sha256}"
    )
    if weights.part == "decoder":
        print(f"use it: tokenizer.decoder={args.out}, beside an encoder in tokenizer.path")
        return 0
    if not args.skip_check:
        print(_differences(args.out, args.cache_dir))
    print(
        f"use it: tokenizer=dalle tokenizer.path={args.out} (with data.token_size 8 times the "
        "patches along a side: 112 for 14 x 14)"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mimkit convert_dalle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", type=Path, nargs="?",
                        help="encoder.pkl, decoder.pkl, dalle_encoder.pth or another")  # fmt: skip
    parser.add_argument("out", metavar="OUT", type=Path, help="the safetensors file to write")
    parser.add_argument("--download", choices=("encoder", "decoder"),
                        help="fetch OpenAI's file and keep it beside OUT")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true",
                        help="replace OUT if it exists (default: refuse)")  # fmt: skip
    parser.add_argument("--skip-check", action="store_true",
                        help="do not compare the tokens of fp32, bf16 and fp16")  # fmt: skip
    parser.add_argument("--cache-dir", default="~/.cache/mimkit", metavar="DIR",
                        help="where the embedded photographs go (%(default)s)")  # fmt: skip
    return parser


def _downloaded(part: str, out: Path) -> Path:
    from mimkit.tokenizers._dalle_download import PUBLISHED, download

    path = out.with_name(f"{part}.pkl")
    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc=path.name, disable=None) as bar:

        def progress(received: int, total: int | None) -> None:
            bar.total = total
            bar.update(received - bar.n)

        download(PUBLISHED[part], path, progress=progress)
    print(f"fetched {path}; it is not needed any more once {out} is written")
    return path


def _differences(path: Path, cache_dir: str) -> str:
    """One line: the share of tokens that other precisions change."""
    import torch

    from mimkit.tokenizers.dalle import DalleTokenizer, Precision, is_slow, precision_differences

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    others: list[Precision] = ["bf16", "fp16"]
    precisions = [precision for precision in others if not is_slow(precision, device)]
    tokenizer = DalleTokenizer(path=str(path)).to(device)
    view_BChw = _photographs(cache_dir).to(device)
    shares = precision_differences(tokenizer, view_BChw, precisions)
    parts = [f"{precision} {share:.2%}" for precision, share in shares.items()]
    parts += [f"{p} not compared, it is slow on this CPU" for p in others if p not in precisions]
    return (
        f"tokens that differ from fp32's on {len(view_BChw)} held-out photographs: "
        f"{', '.join(parts)}"
    )


def _photographs(cache_dir: str) -> "Tensor":
    """Held-out crops of the embedded data set as token views; float32 in [0, 1], BChw."""
    import torch

    from mimkit.batch import to_unit
    from mimkit.build import build_probe_view, build_source
    from mimkit.config import DataConfig

    data = DataConfig(cache_dir=cache_dir)
    source, view = build_source(data, "embedded", split="heldout"), build_probe_view(data)
    views = [view(source[index].image).token_view_Chw for index in range(_PHOTOGRAPHS)]
    return to_unit(torch.stack(views))
