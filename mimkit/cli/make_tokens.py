"""Compute the tokens of a run's augmented epochs once, for every run that would see the same crops.

  tools/make_tokens.py bank                                     the default job's epochs
  tools/make_tokens.py bank --estimate                          what it costs and saves, first
  deepspeed tools/make_tokens.py bank --config mine.yaml --epochs 300      one rank a GPU
  deepspeed tools/pretrain.py --config mine.yaml engine.token_bank=bank stem=linear

The same settings as for pretraining, since crops depend on them: data, tokenizer and seed. Stems,
sizes, masks and everything of training may differ, so the arms of a study share a bank. Training
with it gives exactly the losses of training without, takes no memory or time for the tokenizer and
renders no second view. Run it again to go on after an interruption, or for more epochs.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from mimkit.cli._arguments import find_config, parse, training_parser
from mimkit.config import Config, load_config, to_yaml
from mimkit.errors import UserError

if TYPE_CHECKING:  # they are slow to import, and --help does not need them
    import torch

    from mimkit.data.sources import Source
    from mimkit.tokenizers import VisualTokenizer


def main(argv: Sequence[str]) -> int:
    parser = training_parser("make_tokens", __doc__ or "", "default",
                             folder="the folder of the bank")  # fmt: skip
    parser.add_argument("--epochs", type=int, metavar="K",
                        help="augmented epochs (default: as many as are trained)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, metavar="W",
                        help="processes that render views, a rank (default: 1)")  # fmt: skip
    parser.add_argument("--estimate", action="store_true",
                        help="say what the bank costs and saves, and stop")  # fmt: skip
    arguments = parse(parser, argv)
    config = load_config(find_config(arguments.config), arguments.overrides)
    for flag, value, least in (("--epochs", arguments.epochs, 1),
                               ("--workers", arguments.workers, 0)):  # fmt: skip
        if value is not None and value < least:
            raise UserError(f"{flag} is {value}; set it to {least} or more")
    if config.engine.token_bank is not None:
        raise UserError(
            "engine.token_bank is for pretraining; here the folder is OUT, leave it out"
        )
    if arguments.print_config:
        print(to_yaml(config), end="")
        return 0
    return _run(config, arguments.out, arguments.epochs, arguments.workers, arguments.estimate)


def _run(config: Config, out: Path, epochs: int | None, workers: int, estimate: bool) -> int:
    from mimkit import build
    from mimkit.banks import fill, halves

    tokenizer = build.build_tokenizer(config)
    train, heldout = build.build_data(config.data)
    steps = build.num_steps(config.train, train.epoch_length)
    needed = math.ceil(steps * config.train.batch_size / train.epoch_length)
    epochs = needed if epochs is None else epochs
    device = _device()
    tokenizer.to(device)
    if estimate:
        print(_estimate(config, tokenizer, train, epochs=epochs, device=device))
        return 0
    rank, world = (int(os.environ.get(name, default)) for name, default in
                   (("RANK", "0"), ("WORLD_SIZE", "1")))  # fmt: skip
    if rank == 0:
        _check_health(config, tokenizer, train, out, device)
    for half in halves(config, tokenizer, train, heldout):
        count = epochs if half.name == "train" else 1
        total = sum(len(half.rows(epoch)) for epoch in range(count))
        with tqdm(total=total, desc=f"{half.name} tokens", unit="image", disable=rank > 0 or None,
                  smoothing=0.05) as bar:  # fmt: skip
            fill(half, out, tokenizer, epochs=count, device=device, rank=rank, world=world,
                 workers=workers, progress=bar.update)  # fmt: skip
    if rank == 0:
        print(f"{out}: {epochs} epochs of {train.epoch_length} images"
              f"{'' if world == 1 else f', {world} ranks: all have to end'}. Train with it: "
              f"deepspeed tools/pretrain.py ... engine.token_bank={out}")  # fmt: skip
        if epochs < needed:
            print(f"note: this configuration trains {needed} epochs and needs as many")
    return 0


def _check_health(
    config: Config, tokenizer: "VisualTokenizer", train: "Source", out: Path, device: "torch.device"
) -> None:
    """Runs that use the bank do not look at the tokenizer any more."""
    from mimkit.audit.of_run import RunAudits, audit_tokenizer

    found = audit_tokenizer(tokenizer, train, config.data, name=config.tokenizer.name,
                            seed=config.seed, device=device)  # fmt: skip
    audits = RunAudits([], found)
    print(audits.say(), flush=True)
    audits.save(out.with_name(f"{out.name}-audits"))


def _device() -> "torch.device":
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _estimate(
    config: Config,
    tokenizer: "VisualTokenizer",
    train: "Source",
    *,
    epochs: int,
    device: "torch.device",
) -> str:
    from mimkit.audit.bank_cost import bank_cost

    cost = bank_cost(config, tokenizer, train, epochs=epochs, device=device)
    images = epochs * train.epoch_length
    return (
        f"{epochs} epochs of {train.epoch_length} images, {cost.tokens} tokens each: "
        f"{cost.gigabytes:.3g} GB\n"
        f"measured on {cost.measured} images in this process, on {device.type}: rendering the "
        f"token view {cost.render_ms:.2f} ms an image, the tokenizer {cost.encode_ms:.2f} ms\n"
        f"making the bank takes {_duration(images * (cost.render_ms + cost.encode_ms) / 1e3)} on "
        f"one rank with nothing in parallel; ranks divide it\n"
        f"each run saves {_duration(images * cost.encode_ms / 1e3)} of the tokenizer and "
        f"{_duration(images * cost.second_view_ms / 1e3)} of rendering (CPU time of loaders)\n"
        f"it pays from run number {cost.pays_from} on"
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
