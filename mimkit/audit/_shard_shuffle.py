"""How well a window mixes labels, and what an epoch is in updates."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimkit.audit._shard_findings import Finding
from mimkit.audit._shard_samples import Samples
from mimkit.batch import NO_LABEL
from mimkit.data.order import Order

WELL_MIXED = 0.95
_LEAST_EPOCHS, _MOST_EPOCHS = 3, 100
_ENOUGH = 100_000  # positions of the stream that are looked at, in as many epochs as it takes


@dataclass(frozen=True)
class Shuffle:
    """The order that training gives the samples, judged by the labels that come together.

    Attributes:
        window, num_tars: tars that are mixed with each other, and all.
        batch: images of an update, at most the whole set.
        epochs: that were looked at, from the first on.
        same_label: probability that two images of one batch have the same label.
        same_label_at_random: the same if all samples were shuffled together: the sum over labels
            of n (n - 1) / (N (N - 1)), exactly, for a batch of any size.
        mixed: 1 - (same_label - same_label_at_random) / (1 - same_label_at_random): 1 for a full
            shuffle, 0 where every batch has a single label. Chance may bring it above 1.
        sufficient_window: the smallest that mixes at least 95 %.
    """

    window: int
    num_tars: int
    batch: int
    epochs: int
    same_label: float
    same_label_at_random: float
    mixed: float
    sufficient_window: int

    def findings(self, samples: Samples) -> list[Finding]:
        """A warning where the window is too small."""
        if self.mixed >= WELL_MIXED:
            return []
        detail = (
            f"data.window={self.window} is too small for these {self.num_tars} tars, in which the "
            f"classes lie apart: two images of a batch share their label in {self.same_label:.1%} "
            f"of cases, in a full shuffle in {self.same_label_at_random:.1%}. data.window="
            f"{self.sufficient_window} suffices; so does tools/make_shards.py, which mixes them"
        )
        return [Finding("window_too_small", str(samples.tars[0].parent), detail=detail)]


@dataclass(frozen=True)
class Epoch:
    """An epoch in updates. The stream is endless: what is left over begins the next update.

    Attributes:
        batch: images of an update, over all ranks.
        per_rank: those of one rank.
        updates: in an epoch, with the fraction.
        whole, left_over: updates that are in it entirely, and images after them.
    """

    batch: int
    ranks: int
    per_rank: int
    updates: float
    whole: int
    left_over: int


def epoch_facts(num_samples: int, *, batch: int, ranks: int) -> Epoch:
    whole, left_over = divmod(num_samples, batch)
    return Epoch(batch, ranks, batch // ranks, num_samples / batch, whole, left_over)


def shuffle_facts(samples: Samples, *, window: int, batch: int, seed: int) -> Shuffle | None:
    """None where the question is idle: without labels, with one only, or with single images."""
    labels, num_tars = samples.labels, len(samples.tars)
    at_random = same_label(labels, batch=len(labels))
    batch = min(batch, len(labels))
    if batch < 2 or at_random == 1 or (labels == NO_LABEL).all():
        return None
    epochs = min(_MOST_EPOCHS, max(_LEAST_EPOCHS, math.ceil(_ENOUGH / len(labels))))

    def together(window: int) -> float:
        order = Order(groups=samples.groups, seed=seed, window=window)
        stream = np.concatenate([order.epoch_order(epoch) for epoch in range(epochs)])
        return same_label(labels[stream], batch=batch)

    def mixed(found: float) -> float:
        return 1 - (found - at_random) / (1 - at_random)

    low, high = 0, num_tars  # `low` does not suffice, `high` does
    while high - low > 1:
        middle = (low + high) // 2
        enough = mixed(together(middle)) >= WELL_MIXED
        low, high = (low, middle) if enough else (middle, high)
    found = together(window)
    return Shuffle(window, num_tars, batch, epochs, found, at_random, mixed(found), high)


def same_label(labels: NDArray[np.int64], *, batch: int) -> float:
    """Share of the pairs within whole batches that have one label."""
    num_batches = len(labels) // batch
    pairs = num_batches * batch * (batch - 1)
    if not pairs:
        return 1.0
    _, label = np.unique(labels[: num_batches * batch], return_inverse=True)
    of_batch = np.repeat(np.arange(num_batches), batch) * (label.max() + 1) + label
    _, count = np.unique(of_batch, return_counts=True)
    return float((count * (count - 1)).sum() / pairs)
