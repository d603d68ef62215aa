"""What `pretrain` and `train_tokenizer` take in common."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import psutil

from mimkit.errors import UserError
from mimkit.resources import configs_folder, shipped_config

_LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed.run", "torch/distributed/run")


def training_parser(verb: str, description: str, default: str) -> argparse.ArgumentParser:
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
    parser.add_argument("overrides", nargs="*", metavar="key=value",
                        help="settings, for example train.lr=1e-3 stem=linear")  # fmt: skip
    return parser


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
