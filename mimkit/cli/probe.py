"""Ask a frozen encoder what it knows: kNN, linear and attentive probes on labelled shards.

  python tools/probe.py runs/latest --train shards/train --test shards/test
  python tools/probe.py encoder.safetensors --train A B --test C --probe linear --json probe.json
  python tools/probe.py dinov2.pth --train shards/train --test shards/test --image-size 224

ENCODER is what mimkit.load_encoder reads: a run folder, a checkpoint, an exported file, or somebody
else's weights that `mimkit import_weights` knows. Nothing is downloaded.

  knn        votes of the nearest training images
  linear     one linear layer, on every block and pooling (mean, cls, both), at seven learning rates
  attentive  one learned query over the patch tokens of two blocks, then a linear layer

Block, pooling and setting are chosen on a fifth of the training images (of every class); the winner
then learns from all of them and is tested once. Features are kept and found again by a hash of
encoder, images and view. Exit code: 0 done, 2 something to mend.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimkit.cli._arguments import check_range, output_file, output_folder
from mimkit.cli._device import add_device, chosen_device, chosen_workers
from mimkit.cli._progress import bars
from mimkit.errors import UserError

if TYPE_CHECKING:  # it is slow to import, and --help does not need it
    from mimkit.encoder_probes import ProbeReport

_MOST = 10**12


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    question_of = _checked(arguments)
    from mimkit.encoder_probes import Question, probe_encoder

    device = chosen_device(arguments)
    question = Question(
        train=arguments.train,
        test=arguments.test,
        probes=question_of,
        layers=arguments.layers,
        token_layers=arguments.token_layers,
        image_size=arguments.image_size,
        limit=arguments.limit,
        feature_dir=_feature_dir(arguments),
        cache_dir=arguments.cache_dir,
        device=device,
        workers=chosen_workers(arguments, device),
        seed=arguments.seed,
    )
    with bars("step") as progress:
        report = probe_encoder(
            arguments.encoder, question, say=print, progress=progress, answered=_tell
        )
    _write(report, arguments)
    return 0


def _tell(report: "ProbeReport", name: str) -> None:
    from mimkit.cli._probe_table import data_text, probe_text

    if len(report.answers) == 1:
        print(data_text(report))
    print(probe_text(report, name), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mimkit probe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("encoder", type=Path, metavar="ENCODER", help="what load_encoder reads")
    parser.add_argument("--train", nargs="+", required=True, metavar="SHARDS",
                        help="labelled shards to learn from")  # fmt: skip
    parser.add_argument("--test", nargs="+", required=True, metavar="SHARDS",
                        help="labelled shards to be judged by, once")  # fmt: skip
    parser.add_argument("--probe", nargs="+", metavar="P",
                        help="knn, linear, attentive (default: all)")  # fmt: skip
    parser.add_argument("--layers", nargs="+", type=int, metavar="N",
                        help="blocks, counted from 1 (default: all)")  # fmt: skip
    parser.add_argument("--token-layers", nargs="+", type=int, metavar="N",
                        help="blocks of the attentive probe (default: at 3/4 of the depth, and "
                        "the last)")  # fmt: skip
    parser.add_argument("--image-size", type=int, metavar="PIXELS",
                        help="side of the views (default: the encoder's)")  # fmt: skip
    parser.add_argument("--limit", type=int, metavar="N",
                        help="the first N images of each split (default: all)")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE",
                        help="write everything there, every candidate included")  # fmt: skip
    parser.add_argument("--predictions", type=output_folder, metavar="DIR",
                        help="write DIR/PROBE.safetensors, for mimkit evaluate "
                        "--compare")  # fmt: skip
    parser.add_argument("--features", metavar="DIR",
                        help="where features are kept (default: CACHE/features); none: in memory "
                        "only")  # fmt: skip
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/mimkit"), metavar="CACHE",
                        help="for indexes of shards and features (%(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="S",
                        help="of the images held out and of the heads (default: 0)")  # fmt: skip
    add_device(parser)
    return parser


def _checked(arguments: argparse.Namespace) -> list[str]:
    """The probes; UserError for a number or name that cannot be."""
    from mimkit.downstream.probes import PROBES

    check_range(arguments, seed=(0, 2**63 - 1))
    for name in ("limit", "image_size"):
        if getattr(arguments, name) is not None:
            check_range(arguments, **{name: (1, _MOST)})
    known = {name: PROBES[name]().needs_tokens for name in arguments.probe or PROBES.names()}
    probes = arguments.probe or sorted(known, key=lambda name: (known[name], name))  # cheap first
    if twice := {name for name in probes if probes.count(name) > 1}:
        raise UserError(f"--probe names {', '.join(sorted(twice))} more than once")
    return list(probes)


def _feature_dir(arguments: argparse.Namespace) -> Path | None:
    if arguments.features == "none":
        return None
    return Path(arguments.features or arguments.cache_dir / "features")


def _write(report: "ProbeReport", arguments: argparse.Namespace) -> None:
    from mimkit.files import write_text

    if arguments.json:
        write_text(arguments.json, json.dumps(report.record(), indent=1, allow_nan=False))
        print(f"wrote {arguments.json}")
    if arguments.predictions:
        for name, answer in report.answers.items():
            answer.selected.predictions.save(arguments.predictions / f"{name}.safetensors")
        print(f"wrote {', '.join(f'{name}.safetensors' for name in report.answers)} in "
              f"{arguments.predictions}")  # fmt: skip
