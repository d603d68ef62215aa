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
from mimkit.train.stopwatch import duration

if TYPE_CHECKING:  # they are slow to import, and --help does not need them
    import torch

    from mimkit.data.sources import Source
    from mimkit.tokenizers import VisualTokenizer

_RUNS = 10


def main(argv: Sequence[str]) -> int:
    parser = training_parser("make_tokens", __doc__ or "", "default",
                             folder="the folder of the bank")  # fmt: skip
    parser.add_argument("--epochs", type=int, metavar="K",
                        help="augmented epochs (default: as many as are trained)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, metavar="W",
                        help="processes that render views, a rank (default: 1)")  # fmt: skip
    parser.add_argument("--estimate", action="store_true",
                        help="say what the bank costs and saves, out of a few images and a short "
                        "run, and stop")  # fmt: skip
    parser.add_argument("--runs", type=int, metavar="R",
                        help="with --estimate: runs that share the bank, the arms of a study with "
                        f"one seed (default: {_RUNS})")  # fmt: skip
    arguments = parse(parser, argv)
    config = load_config(find_config(arguments.config), arguments.overrides)
    for flag, value, least in (("--epochs", arguments.epochs, 1),
                               ("--workers", arguments.workers, 0),
                               ("--runs", arguments.runs, 1)):  # fmt: skip
        if value is not None and value < least:
            raise UserError(f"{flag} is {value}; set it to {least} or more")
    if config.engine.token_bank is not None:
        raise UserError(
            "engine.token_bank is for pretraining; here the folder is OUT, leave it out"
        )
    if arguments.print_config:
        print(to_yaml(config), end="")
        return 0
    if arguments.runs is not None and not arguments.estimate:
        raise UserError("--runs says for how many runs to estimate; give --estimate with it")
    runs = (arguments.runs or _RUNS) if arguments.estimate else None
    return _run(config, arguments.out, arguments.epochs, arguments.workers, runs)


def _run(config: Config, out: Path, epochs: int | None, workers: int, runs: int | None) -> int:
    """`runs`: only estimates, for so many."""
    from mimkit import build
    from mimkit.banks import fill, halves

    tokenizer = build.build_tokenizer(config)
    train, heldout = build.build_data(config.data)
    steps = build.num_steps(config.train, train.epoch_length)
    needed = math.ceil(steps * config.train.batch_size / train.epoch_length)
    epochs = needed if epochs is None else epochs
    wanted = halves(config, tokenizer, train, heldout)  # refuses targets that are no words
    device = _device()
    tokenizer.to(device)
    rank, world = (int(os.environ.get(name, default)) for name, default in
                   (("RANK", "0"), ("WORLD_SIZE", "1")))  # fmt: skip
    if runs is not None:
        if world > 1:
            raise UserError(f"--estimate measures on one rank, and {world} were launched; start it "
                            "without a launcher: python tools/make_tokens.py ...")  # fmt: skip
        trained = steps * config.train.batch_size
        print(_estimate(config, tokenizer, train, epochs=epochs, trained=trained, runs=runs,
                        device=device))  # fmt: skip
        return 0
    if rank == 0:
        _check_health(config, tokenizer, train, out, device)
    for half in wanted:
        count = epochs if half.name == "train" else 1
        total = sum(len(half.rows(epoch)) for epoch in range(count))
        with tqdm(total=total, desc=f"{half.name} tokens", unit="image", disable=rank > 0 or None,
                  smoothing=0.05) as bar:  # fmt: skip
            fill(half, out, tokenizer, epochs=count, device=device, rank=rank, world=world,
                 workers=workers, progress=bar.update)  # fmt: skip
    if rank == 0:
        print(f"{out}: {_epochs(epochs)} of {train.epoch_length} images"
              f"{'' if world == 1 else f', {world} ranks: all have to end'}. Train with it: "
              f"deepspeed tools/pretrain.py ... engine.token_bank={out}")  # fmt: skip
        if epochs < needed:
            print(f"note: this configuration trains {_epochs(needed)} and needs as many")
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
    trained: int,
    runs: int,
    device: "torch.device",
) -> str:
    from mimkit.audit.bank_cost import bank_cost, step_time

    cost = bank_cost(config, tokenizer, train, epochs=epochs, device=device)
    images = epochs * train.epoch_length
    step = step_time(config)
    study = step.of_study(cost, bank_images=images, run_images=trained)
    return (
        f"{_epochs(epochs)} of {train.epoch_length} images, {cost.tokens} tokens each: "
        f"{cost.gigabytes:.3g} GB\n"
        f"measured on {cost.measured} images in this process, on {device.type}: rendering the "
        f"token view {cost.render_ms:.2f} ms an image, the tokenizer {cost.encode_ms:.2f} ms\n"
        f"making the bank takes {duration(cost.making_s(images))} on one rank with nothing in "
        f"parallel; ranks divide it\n"
        f"each run, which trains on {trained} images, saves "
        f"{duration(cost.tokenizer_saved_s(trained))} of the tokenizer and "
        f"{duration(cost.rendering_saved_s(trained))} of rendering (CPU time of loaders)\n"
        f"it pays from run number {cost.pays_from(bank_images=images, run_images=trained)} on\n"
        f"share of a study's time that goes into tokens: {study.without_bank:.1%} without a bank "
        f"({step.updates} real updates of {step.batch} images: {step.ms:.2f} ms an image), "
        f"{study.with_bank(runs=runs):.1%} with one bank for {runs}; under 2 % from "
        f"{study.runs_for(0.02)} runs on (each seed of a study has a bank of its "
        "own; with data.view_seed all share one)"
    )


def _epochs(number: int) -> str:
    return f"{number} epoch{'s' * (number != 1)}"
