"""Where a command computes, and with how many loader processes."""

import argparse
import os

from mimkit.errors import UserError


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", metavar="D",
                        help="cpu, cuda, or auto for a GPU where there is one")  # fmt: skip
    parser.add_argument("--workers", type=int, metavar="W",
                        help="processes that read images (default: one on a CPU, up to 16 for a "
                        "GPU; 0 reads in this one)")  # fmt: skip


def chosen_device(arguments: argparse.Namespace) -> str:
    """cpu or cuda; UserError where there is no such thing here."""
    import torch

    asked = str(arguments.device)
    if asked not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device is '{asked}'; expected cpu, cuda or auto")
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was given, but torch finds no GPU here "
                        f"(torch {torch.__version__}); leave it out to use the CPU")  # fmt: skip
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def chosen_workers(arguments: argparse.Namespace, device: str) -> int:
    """Loader processes for this device."""
    if arguments.workers is None:
        return 1 if device == "cpu" else min(16, len(os.sched_getaffinity(0)))
    if arguments.workers < 0:
        raise UserError(f"--workers is {arguments.workers}; set it to 0 or more")
    return int(arguments.workers)
