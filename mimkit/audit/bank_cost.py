"""What a token bank costs and saves, from a few images."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mimkit import build
from mimkit.batch import Batch, to_unit
from mimkit.config import Config
from mimkit.data.loader import slot_loader
from mimkit.data.order import Order
from mimkit.data.sampler import Slot
from mimkit.data.sources import Source
from mimkit.tokenizers import VisualTokenizer

_BATCH, _BATCHES = 16, 4


@dataclass(frozen=True)
class BankCost:
    """Milliseconds an image, measured one after the other in one process."""

    measured: int
    tokens: int  # of an image
    gigabytes: float
    render_ms: float  # read, decode, crop, the token view
    encode_ms: float  # the tokenizer
    second_view_ms: float  # what a run's loaders save: both views, less the encoder's alone

    @property
    def pays_from(self) -> int:
        """The run from which on making the bank has cost less than the tokenizer in every run."""
        saved = self.encode_ms + max(0.0, self.second_view_ms)
        return max(1, math.ceil((self.render_ms + self.encode_ms) / saved))


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
                             seed=config.seed, batches=cut, workers=0,
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
