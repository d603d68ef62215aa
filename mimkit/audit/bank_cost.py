"""What a token bank costs and saves, from a few images and a few updates."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mimkit import build, estimate
from mimkit.batch import Batch, to_unit
from mimkit.config import Config
from mimkit.data.loader import slot_loader
from mimkit.data.order import Order
from mimkit.data.sampler import Slot
from mimkit.data.sources import Source
from mimkit.pretraining import run
from mimkit.tokenizers import VisualTokenizer

_BATCH, _BATCHES = 16, 4
_UPDATES, _MOST_IMAGES = 20, 64  # of the short run, and of its batch: one rank makes it


@dataclass(frozen=True)
class BankCost:
    """Milliseconds an image, measured one after the other in one process."""

    measured: int
    tokens: int  # of an image
    gigabytes: float
    render_ms: float  # read, decode, crop, the token view
    encode_ms: float  # the tokenizer
    second_view_ms: float  # what a run's loaders save: both views, less the encoder's alone

    def making_s(self, images: int) -> float:
        """Seconds for a bank of so many rows."""
        return images * (self.render_ms + self.encode_ms) / 1e3

    def rendering_saved_s(self, images: int) -> float:
        """Seconds of its loaders that a run of so many images saves by it."""
        return images * max(0.0, self.second_view_ms) / 1e3

    def tokenizer_saved_s(self, images: int) -> float:
        """Seconds of the tokenizer."""
        return images * self.encode_ms / 1e3

    def pays_from(self, *, bank_images: int, run_images: int) -> int:
        """The run from which on making the bank has cost less than what the runs have saved."""
        saved = self.tokenizer_saved_s(run_images) + self.rendering_saved_s(run_images)
        return max(1, math.ceil(self.making_s(bank_images) / saved - 1e-9))


@dataclass(frozen=True)
class StudyShare:
    """Which share of its time a study spends on tokens, with a bank and without.

    Every run of it trains on as many images as the others. Runs that share a bank have one seed:
    with s seeds there are s banks and s times as many runs, and the share stays.
    """

    making_s: float  # of the bank, once
    run_s: float  # the updates of one run, without the tokenizer
    tokenizer_s: float  # what it adds to a run that has no bank

    @property
    def without_bank(self) -> float:
        return self.tokenizer_s / (self.run_s + self.tokenizer_s)

    def with_bank(self, *, runs: int) -> float:
        """Where so many runs share it."""
        return self.making_s / (self.making_s + runs * self.run_s)

    def runs_for(self, share: float) -> int:
        """How many have to share it until it takes no more than this share."""
        runs = self.making_s * (1 - share) / (share * self.run_s)
        return max(1, math.ceil(runs - 1e-9))  # 24.000000001 are 24


@dataclass(frozen=True)
class StepTime:
    """Of real updates on one rank."""

    updates: int
    batch: int
    ms: float  # an image, the tokenizer included
    tokenizer_share: float

    def of_study(self, cost: BankCost, *, bank_images: int, run_images: int) -> StudyShare:
        """The share of tokens, where a bank has so many rows and a run so many images."""
        seconds = run_images * self.ms / 1e3
        return StudyShare(
            making_s=cost.making_s(bank_images),
            run_s=seconds * (1 - self.tokenizer_share),
            tokenizer_s=seconds * self.tokenizer_share,
        )


def step_time(config: Config) -> StepTime:
    """A short run of plain PyTorch in this process, in a folder that is removed again."""
    batch = min(_MOST_IMAGES, max(1, config.train.batch_size // config.engine.accumulation))
    one_rank = {"runtime": "local", "accumulation": 1, "deepspeed_config": None, "zero_stage": 0}
    short = config.model_copy(
        update={"train": config.train.model_copy(update={"batch_size": batch}),
                "engine": config.engine.model_copy(update=one_rank)}
    )  # fmt: skip
    folder = estimate.measure(short, run, steps=_UPDATES, started_at=time.time())
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
    finally:
        estimate.remove(folder)
    ms = 1e3 / summary["images_per_second"]
    return StepTime(_UPDATES, batch, ms, summary["tokenizer_share"])


def bank_cost(
    config: Config, tokenizer: VisualTokenizer, train: Source, *, epochs: int, device: torch.device
) -> BankCost:
    """Raises UserError for a sample that cannot be read."""
    order = Order(groups=train.groups, seed=config.seed, window=config.data.window, sets=train.sets)
    count = min(_BATCH * _BATCHES, len(order))
    slots = [Slot(*order.locate(place)) for place in range(count)]
    rows, columns = tokenizer.grid(config.data.token_size, config.data.token_size)

    def batches(which: build.Which) -> list[Batch]:
        cut = [slots[first : first + _BATCH] for first in range(0, count, _BATCH)]
        loader = slot_loader(source=train, view=build.build_views(config.data, which),
                             seed=config.data.seed_of_views(config.seed), batches=cut, workers=0,
                             on_bad_sample=config.data.on_bad_sample)  # fmt: skip
        return list(loader)

    def encode() -> None:
        for batch in token_batches:
            tokenizer.encode(to_unit(batch.token_view_BChw.to(device))).cpu()

    batches("both")  # reads the files and compiles what is compiled
    token_batches = batches("tokens")
    encode()
    return BankCost(
        measured=count,
        tokens=rows * columns,
        gigabytes=2 * rows * columns * epochs * train.epoch_length / 1e9,
        render_ms=_ms(lambda: batches("tokens"), count),
        encode_ms=_ms(encode, count),
        second_view_ms=_ms(lambda: batches("both"), count) - _ms(lambda: batches("patches"), count),
    )


def _ms(work: Callable[[], object], images: int) -> float:
    """The best of three, an image; device work ends in a copy to the CPU."""
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best / images
