"""What `pretrain` and `train_tokenizer` say about their schedules before they train."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimkit.cli._arguments import output_file
from mimkit.config import Config, FinetuneConfig, TokenizerConfig, TrainConfig
from mimkit.config import recipe as recipe_of

if TYPE_CHECKING:
    Training = Config | TokenizerConfig | FinetuneConfig

_FAR = 4.0  # times the recipe's batch: there a learning rate that was not changed is suspect


def add_plot_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot-schedule", type=output_file, metavar="PNG",
                        help="draw learning rate, weight decay and momentum, and stop")  # fmt: skip


def plot_schedule(
    config: "Training", path: Path, *, scales: Mapping[str, float] | None = None
) -> None:
    """Writes the picture; opens the data where a run is measured in epochs.

    Args:
        scales: see `schedules_of`.
    """
    from mimkit import build
    from mimkit.schedule_plot import save_schedule_plot, schedules_of

    train = config.train
    length = 0 if train.steps is not None else build.build_data(config.data)[0].epoch_length
    steps = build.num_steps(train, length)
    title = f"{config.name}: {steps} updates of {train.batch_size} images"
    panels = schedules_of(train, steps=steps, scales=scales)
    save_schedule_plot(path, panels, steps=steps, title=title)
    print(f"wrote {path}: {title}")


def layer_scales(decay: float) -> dict[str, float] | None:
    """Factors of the learning rate at some depths, counted from the head: a picture needs no
    encoder to be opened. None where all layers have the same."""
    if decay == 1.0:
        return None
    return {"head": 1.0} | {f"{k} below the head": decay**k for k in (1, 2, 4, 8, 12)}


def warn_of_batch(path: Path, train: TrainConfig, overrides: Sequence[str]) -> None:
    """Says so, on rank 0, where the batch is far from the one that the learning rate was for."""
    text = far_from_recipe(path, train, overrides)
    if text is not None and os.environ.get("RANK", "0") == "0":
        print(f"warning: {text}", file=sys.stderr, flush=True)


def far_from_recipe(path: Path, train: TrainConfig, overrides: Sequence[str]) -> str | None:
    """What is wrong, if anything: a learning rate is never scaled by us."""
    if any(text.startswith("train.lr=") for text in overrides):
        return None
    batch = recipe_of(path).get("batch_size", type(train).model_fields["batch_size"].default)
    factor = train.batch_size / batch
    if 1 / _FAR <= factor <= _FAR:
        return None
    return (
        f"train.batch_size={train.batch_size} is {factor:.3g} times the {batch} of {path.name}, "
        f"but train.lr={train.lr:g} is as there, and is not scaled. In proportion it would be "
        f"{train.lr * factor:.3g}, by the square root {train.lr * factor**0.5:.3g}; set train.lr"
    )
