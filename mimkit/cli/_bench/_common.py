"""What measurements of a model take and write in common."""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from mimkit.cli._arguments import output_file
from mimkit.errors import UserError

if TYPE_CHECKING:  # slow to import, and --help does not need them
    import torch

    from mimkit.bench.comparison import Comparison


def add_machine_arguments(
    parser: argparse.ArgumentParser, *, batch: int | None, rounds: int
) -> None:
    """--size, --batch (unless None: it has none), --rounds, --device and --json."""
    parser.add_argument("--size", choices=["Ti", "S", "B", "L"], default="S",
                        help="of the ViT, patches of 16, images of 224 (%(default)s)")  # fmt: skip
    if batch is not None:
        parser.add_argument("--batch", type=int, default=batch, metavar="N",
                            help="images of an update (%(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=rounds, metavar="R",
                        help="everything is timed R times (%(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="F", help="write the numbers to a file")


def add_precision(parser: argparse.ArgumentParser) -> None:
    """--precision of what is measured in one only."""
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto",
                        help="auto: bf16 if the hardware multiplies it (%(default)s)")  # fmt: skip


def one_precision(arguments: argparse.Namespace, device: "torch.device") -> bool:
    """Whether bf16."""
    return precisions_of(arguments.precision, device)[0]


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """UserError for a number that is not more than 0."""
    for name in names:
        value = getattr(arguments, name)
        if not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {value}; expected more than 0")


def device_of(arguments: argparse.Namespace) -> "torch.device":
    """UserError where there is no such device."""
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but torch finds no GPU here; leave it out for the CPU")
    return torch.device(arguments.device)


def precisions_of(word: str, device: "torch.device") -> list[bool]:
    """Whether bf16, of each precision that is asked for."""
    from mimkit.models.matmul import multiplies_bf16

    if word == "auto":
        return [True, False] if multiplies_bf16(device) else [False]
    return {"both": [True, False], "bf16": [True], "fp32": [False]}[word]


@contextmanager
def progress(what: str, pieces: int) -> Iterator[Callable[[], object]]:
    """A bar, on a terminal; gives what is to be called after each piece."""
    with tqdm(total=pieces, desc=f"bench {what}", disable=None) as bar:
        yield bar.update


def write_json(arguments: argparse.Namespace, numbers: dict[str, Any]) -> None:
    """To --json, if it was given, with the versions of what was measured."""
    if arguments.json:
        from mimkit.files import write_text
        from mimkit.runs import versions

        write_text(arguments.json, json.dumps({**numbers, "versions": versions()}, indent=2) + "\n")


def tell(arguments: argparse.Namespace, comparisons: "Sequence[Comparison]") -> None:
    """Prints them, and writes them to --json."""
    from mimkit.cli._bench._comparison_report import as_numbers, as_text

    print(as_text(comparisons))
    write_json(arguments, as_numbers(comparisons))
