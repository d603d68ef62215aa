"""`mimkit bench step`: the training step beside BEiT's, its share of the machine, its memory."""

import argparse

from mimkit.cli._bench._common import (
    add_machine_arguments,
    check_positive,
    device_of,
    precisions_of,
    progress,
    write_json,
)
from mimkit.cli._folder import Subparsers

_EPILOG = """
The plain way is BEiT's own step, written out in mimkit/bench/plain_step.py: before anything is
timed, losses and gradients of both are proven equal (fp32 1e-5, bf16 3e-2). Updates take turns in
rotating order; on a CPU in one thread and in CPU time, so that other load counts as little as it
can, on a GPU between CUDA events. MFU is the step's arithmetic, attention counted as the plain
formula, over the best rate of matrix products that was measured in the same run.

examples:
  tools/bench.py step
  tools/bench.py step --size B --batch 4 --precision fp32 --rounds 2 --json step.json
  tools/bench.py step --device cuda --size B --batch 128 --compile
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "step",
        help="the training step: time, MFU and memory beside BEiT's own",
        description="The training step beside BEiT's, written plainly: time, MFU, memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_machine_arguments(parser, batch=4, rounds=3)
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16", "both"], default="auto",
                        help="auto: bf16, if the hardware multiplies it, and fp32 "
                        "(%(default)s)")  # fmt: skip
    parser.add_argument("--compile", action="store_true",
                        help="also with engine.compile=block, which takes a minute")  # fmt: skip
    parser.add_argument("--against", metavar="PATH",
                        help="time the official code too: beit/ of a unilm checkout")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for what a user can mend."""
    check_positive(arguments, "batch", "rounds")
    from mimkit.bench.step import measure, num_pieces
    from mimkit.cli._bench._step_report import as_numbers, as_text
    from mimkit.models.compiled import check_compiler

    device = device_of(arguments)
    precisions = precisions_of(arguments.precision, device)
    if arguments.compile:
        check_compiler(device)
    pieces = num_pieces(
        precisions=len(precisions), rounds=arguments.rounds, compiled=arguments.compile,
        official=arguments.against is not None,
    )  # fmt: skip
    with progress("step", pieces) as done:
        report = measure(
            arguments.size, batch=arguments.batch, precisions=precisions, device=device,
            rounds=arguments.rounds, compiled=arguments.compile, official=arguments.against,
            done=done,
        )  # fmt: skip
    print(as_text(report))
    write_json(arguments, as_numbers(report))
    return 0
