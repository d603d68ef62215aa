"""What `pretrain` and `train_tokenizer` take in common."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from mimkit.errors import UserError
from mimkit.resources import configs_folder, shipped_config

_LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed.run", "torch/distributed/run")


def training_parser(
    verb: str, description: str, default: str, *, folder: str | None = None
) -> argparse.ArgumentParser:
    """`folder`: what the folder OUT is that stands before the settings, where there is one."""
    parser = argparse.ArgumentParser(
        prog=f"mimkit {verb}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", default=default, metavar="YAML",
        help=f"a file, or the name of one of configs/ (default: {default})",
    )  # fmt: skip
    parser.add_argument("--print-config", action="store_true",
                        help="print the resolved configuration and stop")  # fmt: skip
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    if folder is not None:
        parser.add_argument("out", type=Path, metavar="OUT", help=folder)
    parser.add_argument("overrides", nargs="*", metavar="key=value",
                        help="settings, for example train.lr=1e-3 stem=linear")  # fmt: skip
    return parser


def output_file(text: str) -> Path:
    """An argparse type: a file to be written, refused before hours are spent on what goes in."""
    path = Path(text)
    if not text or text.endswith("/") or path.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is a folder; give the name of a file")
    return _below_a_folder(path)


def output_folder(text: str) -> Path:
    """An argparse type: a folder to be filled."""
    path = Path(text)
    if not text or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"'{text}' is no folder; give the name of one")
    return _below_a_folder(path)


def _below_a_folder(path: Path) -> Path:
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"'{path}' cannot be written: {above} takes no files")
    return path


def check_range(arguments: argparse.Namespace, **ranges: tuple[int, int]) -> None:
    """UserError for a number that is out of its range (both ends belong to it) or not given."""
    for name, (least, most) in ranges.items():
        value = getattr(arguments, name)
        if not least <= value <= most:
            raise UserError(
                f"--{name.replace('_', '-')} is {value}; set it to a number from {least} to {most}"
            )


def parse_size(text: str | None) -> tuple[int, int] | None:
    """`384` or `192x320` as height and width."""
    if text is None:
        return None
    sides = text.split("x") if "x" in text else [text, text]
    if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise UserError(
            f"--image-size is '{text}'; expected pixels of a square, such as 384, or height x "
            "width, such as 192x320"
        )
    return int(sides[0]), int(sides[1])


def find_config(name: str) -> Path:
    """A path as it is given, or the name of a shipped configuration with or without `.yaml`."""
    if Path(name).exists():
        return Path(name)
    if (shipped := shipped_config(name)) is not None:
        return shipped
    known = ", ".join(sorted(path.stem for path in configs_folder().glob("*.yaml")))
    raise UserError(f"there is no configuration file '{name}'. Shipped ones: {known}")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Overrides may stand before and after options; anything else unknown is an error."""
    return parser.parse_intermixed_args(argv)


def command_time() -> float:
    """When the command was given: the start of the launcher, or of this process without one."""
    process = psutil.Process()
    started = process.create_time()
    for ancestor in process.parents():
        try:
            command = " ".join(ancestor.cmdline()[:4])
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            break
        if not any(launcher in command for launcher in _LAUNCHERS):
            break
        started = ancestor.create_time()
    return float(started)
