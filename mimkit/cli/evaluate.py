"""Evaluate a finetuned model on labelled shards, or compare the predictions of two.

  python tools/evaluate.py runs/finetune-001 shards/test --json a.json --predictions a.safetensors
  deepspeed tools/evaluate.py runs/finetune-001 shards/imagenet-val --set imagenet --real real.json
  python tools/evaluate.py --compare a.safetensors b.safetensors
  python tools/evaluate.py --list-sets

MODEL is the run folder of a finetuning, its best/, or a folder of `mimkit merge`. The numbers are
the same on any number of ranks: top-1 and top-5 with 95 % intervals, the mean over classes,
calibration, loss, and the accuracy of every class (--json). Predictions are kept per image, so that
two models can be compared by --compare: McNemar's exact test, and the difference with its interval.
Sets, their official layouts and how shards are made of them: docs/evaluation.md.
"""

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from mimkit.cli._arguments import output_file, parse_size
from mimkit.cli._progress import bars
from mimkit.errors import UserError

if TYPE_CHECKING:  # they are slow to import, and --help does not need them
    from mimkit.evaluation import Evaluated, Evaluation

_WORST = 5  # classes that are listed


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.list_sets:
        print(_sets())
        return 0
    if arguments.compare:
        return _compare(*arguments.compare)
    if arguments.model is None or not arguments.data:
        raise UserError("give a finetuned MODEL and DATA, its labelled shards; or --compare A B")
    return _evaluate(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mimkit evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="a finetuned model")
    parser.add_argument("data", nargs="*", metavar="DATA", help="labelled shards")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"),
                        help="two files of --predictions, or folders that hold one")  # fmt: skip
    parser.add_argument("--list-sets", action="store_true", help="print the known sets and stop")
    parser.add_argument("--set", metavar="NAME", help="check counts and labels of a known set")
    parser.add_argument("--real", type=Path, metavar="FILE",
                        help="ReaL's real.json, for ImageNet's validation images")  # fmt: skip
    parser.add_argument("--image-size", metavar="N or HxW",
                        help="pixels (default: the model's)")  # fmt: skip
    parser.add_argument("--crop", type=float, metavar="SHARE",
                        help="of the short side that is shown (default: data.test_crop of the "
                        "model's run, else 1)")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers there")
    parser.add_argument("--predictions", type=output_file, metavar="FILE",
                        help="write what was said of each image (.safetensors)")  # fmt: skip
    parser.add_argument("--picture", type=output_file, metavar="FILE",
                        help="draw confusions and calibration (.png)")  # fmt: skip
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/mimkit"), metavar="CACHE",
                        help="for indexes of read-only shards (%(default)s)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, metavar="W",
                        help="processes that read images, a rank (default: 1)")  # fmt: skip
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser


def _evaluate(arguments: argparse.Namespace) -> int:
    asked = _asked(arguments)
    from mimkit.evaluation import evaluate
    from mimkit.train.runtimes import RUNTIMES

    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    runtime = RUNTIMES["deepspeed" if launched else "local"]()
    with bars("batch") if runtime.rank == 0 else nullcontext(_silent) as progress:
        found = evaluate(arguments.model, asked, runtime=runtime, progress=progress)
    if launched:
        runtime.close()
    if runtime.rank == 0:
        print(_text(found, arguments.model))
        _write(found, arguments)
    return 0


def _silent(stage: str, done: int, total: int) -> None: ...


def _asked(arguments: argparse.Namespace) -> "Evaluation":
    """UserError for what cannot be."""
    from mimkit.data.known_sets import known_set
    from mimkit.evaluation import Evaluation

    if arguments.set is not None:
        known_set(arguments.set)
    if arguments.crop is not None and not 0 < arguments.crop <= 1:
        raise UserError(f"--crop is {arguments.crop:g}; set it to a share in (0, 1]")
    if arguments.workers < 0:
        raise UserError(f"--workers is {arguments.workers}; set it to 0 or more")
    return Evaluation(
        data=arguments.data,
        set_name=arguments.set,
        real=arguments.real,
        image_size=parse_size(arguments.image_size),
        crop=arguments.crop,
        cache_dir=arguments.cache_dir,
        workers=arguments.workers,
    )


def _text(found: "Evaluated", model: Path) -> str:
    scores, classes = found.scores, found.predictions.classes
    lines = [f"{model}: {scores.top1.total} images, {found.predictions.num_classes} classes"]
    lines += [f"note: {note}" for note in found.notes]
    lines.append(f"top-1     {scores.top1}  (95 %, of images like these)")
    if scores.top5 is not None:
        lines.append(f"top-5     {scores.top5}")
    if found.real is not None:
        lines.append(f"ReaL      {found.real}  ({found.real.total} images have such labels)")
    lines += [
        f"balanced  {scores.balanced:.2%}  (mean over classes)",
        f"loss      {scores.nll:.4f} nats; ECE {scores.ece:.4f} "
        f"(mean confidence {float(found.predictions.confidence.mean()):.2%})",
    ]
    accuracies = scores.class_accuracy_V.nan_to_num(nan=2.0)  # without an image: not the worst
    worst = accuracies.argsort()[: min(_WORST, len(accuracies))].tolist()
    named = [f"{classes[n] if classes else n} {scores.class_accuracy_V[n]:.1%}" for n in worst
             if accuracies[n] <= 1]  # fmt: skip
    return "\n".join([*lines, f"worst classes: {', '.join(named)}"])


def _write(found: "Evaluated", arguments: argparse.Namespace) -> None:
    if arguments.json:
        from mimkit.files import write_text

        record = {"model": str(arguments.model), "data": arguments.data, **found.scores.record(),
                  "classes": found.predictions.classes, "notes": found.notes,
                  "real": found.real.record() if found.real else None,
                  "source": found.predictions.source}  # fmt: skip
        write_text(arguments.json, json.dumps(record, indent=1, allow_nan=False))
    if arguments.predictions:
        found.predictions.save(arguments.predictions)
    if arguments.picture:
        from mimkit.cli._confusion_picture import save_confusion_picture

        save_confusion_picture(arguments.picture, found.predictions)
    written = [str(file) for file in (arguments.json, arguments.predictions, arguments.picture)
               if file]  # fmt: skip
    if written:
        print(f"wrote {', '.join(written)}")


def _compare(first: Path, second: Path) -> int:
    from mimkit.downstream.compare import compare
    from mimkit.downstream.predictions import load_predictions
    from mimkit.downstream.scores import share

    one, other = load_predictions(first), load_predictions(second)
    found = compare(one, other)
    print(
        f"A  {share(one.correct)}  {first}\nB  {share(other.correct)}  {second}\n"
        f"A - B = {100 * found.difference:+.2f} points, 95 % interval {100 * found.low:+.2f} to "
        f"{100 * found.high:+.2f} ({found.images} images)\n"
        f"both right {found.both}, only A {found.only_one}, only B {found.only_other}, neither "
        f"{found.neither}; McNemar's exact p = {found.p:.3g}\n"
        "About these two trained models; other seeds of training differ more."
    )
    return 0


def _sets() -> str:
    from mimkit.data.known_sets import KNOWN_SETS

    lines = ["name          classes   images  of"]
    lines += [f"{name:12}{known.classes:9}{known.test_images:9}  {known.about}"
              for name, known in KNOWN_SETS.items()]  # fmt: skip
    return "\n".join([*lines, "", "How shards are made of each: docs/evaluation.md"])
