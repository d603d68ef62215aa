"""Batches for one rank: an endless stream for training, one pass for evaluation.

Who computes what (ranks, workers, batch size) is arithmetic on one position; what a sample looks
like depends on (seed, epoch, sample) only. So a position is the whole state of the data.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mimkit.batch import Batch, Sample, Views, collate
from mimkit.data.decode import DecodeError
from mimkit.data.order import Order
from mimkit.data.sampler import EvalSampler, MicroBatch, Share, Slot, TrainSampler
from mimkit.data.sources import Source
from mimkit.data.views import ViewMaker
from mimkit.errors import UserError
from mimkit.random import Purpose, Rng, generator

MaskMaker = Callable[[Rng], NDArray[np.bool_]]
OnBadSample = Literal["raise", "substitute"]
PADDING = -1  # index_B of what only fills a batch of an evaluation
_MOST_SUBSTITUTES = 16  # neighbours tried; more in a row is a damaged set, not a bad image


class BatchLoader:
    """Iterates over `Batch`es; errors of the workers arrive as they were raised.

    Attributes:
        num_substituted: bad samples that were replaced in the batches given out so far.
    """

    def __init__(self, loader: "DataLoader[_Outcome]", *, num_batches: int | None) -> None:
        self._loader, self._num_batches = loader, num_batches
        self.num_substituted = 0

    def __iter__(self) -> Iterator[Batch]:
        for outcome in self._loader:
            if outcome.error is not None:
                raise UserError(outcome.error)
            assert outcome.batch is not None
            self.num_substituted += outcome.num_substituted
            yield outcome.batch

    def __len__(self) -> int:
        """Batches of one evaluation. Raises TypeError for the endless stream of training."""
        if self._num_batches is None:
            raise TypeError("the training stream has no end")
        return self._num_batches


def train_loader(
    *,
    source: Source,
    views: ViewMaker,
    mask: MaskMaker | None,
    seed: int,
    batch_size: int,
    rank: int,
    world: int,
    position: int,
    window: int,
    workers: int,
    on_bad_sample: OnBadSample = "raise",
    pin_memory: bool = False,
) -> BatchLoader:
    """Batches for ever. Micro-batch k of this rank covers the positions from
    `position + (k * world + rank) * batch_size` on; after k micro-batches the position to resume
    from is `position + k * world * batch_size`.

    Args:
        batch_size: samples of one rank's micro-batch.
        window: shards that are mixed with each other, see `Order`.
        workers: processes; 0 computes in this one. The batches are the same.
        on_bad_sample: "substitute" takes the next sample in the source under the keys of the bad
            one, and counts it.

    Raises:
        UserError: while iterating, for a sample that cannot be read or decoded.
    """
    order = Order(groups=source.groups, seed=seed, window=window)
    share = Share(batch_size=batch_size, rank=rank, world=world)
    samples = _Samples(source, views, mask, seed, on_bad_sample)
    sampler = TrainSampler(order=order, share=share, position=position)
    return BatchLoader(_loader(samples, sampler, workers, pin_memory), num_batches=None)


def eval_loader(
    *,
    source: Source,
    view: ViewMaker,
    mask: MaskMaker | None,
    seed: int,
    batch_size: int,
    rank: int,
    world: int,
    workers: int,
    limit: int | None = None,
    pin_memory: bool = False,
) -> BatchLoader:
    """The first `limit` samples (all by default), each once over all ranks, the same every time.

    Every rank gets equally many full batches; `index_B` is PADDING where a sample only fills one.
    Views and masks are drawn as in epoch 0.

    Raises:
        UserError: while iterating, for a sample that cannot be read or decoded.
    """
    num_samples = len(source) if limit is None else min(limit, len(source))
    share = Share(batch_size=batch_size, rank=rank, world=world)
    sampler = EvalSampler(num_samples=num_samples, share=share)
    samples = _Samples(source, view, mask, seed, "raise")
    loader = _loader(samples, sampler, workers, pin_memory)
    return BatchLoader(loader, num_batches=len(sampler))


@dataclass(frozen=True)
class _Outcome:
    """What a worker sends: a batch, or the message of an error.

    An exception would arrive with its traceback as the message.
    """

    batch: Batch | None = None
    error: str | None = None
    num_substituted: int = 0

    def pin_memory(self) -> "_Outcome":  # called by the DataLoader
        batch = None if self.batch is None else self.batch.pin_memory()
        return _Outcome(batch, self.error, self.num_substituted)


@dataclass(frozen=True)
class _Samples(Dataset[_Outcome]):
    """Micro-batches by their list of slots; runs in the workers."""

    source: Source
    views: ViewMaker
    mask: MaskMaker | None
    seed: int
    on_bad_sample: OnBadSample

    def __getitem__(self, slots: MicroBatch) -> _Outcome:
        try:
            items = [self._item(slot) for slot in slots]
        except UserError as error:
            return _Outcome(error=str(error))
        num_substituted = sum(tried for *_, tried in items)
        return _Outcome(collate([item for item, _ in items]), num_substituted=num_substituted)

    def _item(self, slot: Slot) -> tuple[tuple[Views, Tensor, int, int], int]:
        """(views, mask, label, index) as `collate` takes them, and the bad samples before it."""
        most = _MOST_SUBSTITUTES if self.on_bad_sample == "substitute" else 0
        for tried in range(most + 1):
            sample = self.source[(slot.sample + tried) % len(self.source)]
            try:
                views = self.views(sample.image, self._rng(Purpose.VIEW, slot))
                break
            except DecodeError as error:
                if tried == most:
                    raise UserError(_undecodable(sample, error, most)) from error
        index = PADDING if slot.is_padding else sample.index
        return (views, self._mask(slot), sample.label, index), tried

    def _rng(self, purpose: Purpose, slot: Slot) -> Rng:
        return generator(purpose, seed=self.seed, epoch=slot.epoch, sample=slot.sample)

    def _mask(self, slot: Slot) -> Tensor:
        if self.mask is None:
            return torch.empty(0, dtype=torch.bool)
        return torch.from_numpy(self.mask(self._rng(Purpose.MASK, slot)))


def _undecodable(sample: Sample, cause: DecodeError, most: int) -> str:
    tried = f", nor can the {most} samples before it" if most else ""
    return (
        f"sample {sample.index}, key '{sample.key}', in {sample.origin}, cannot be decoded{tried}: "
        f"{cause}. tools/make_shards.py writes shards without such images and lists them; "
        "data.on_bad_sample=substitute takes the next sample instead and counts it."
    )


def _loader(
    samples: _Samples, sampler: TrainSampler | EvalSampler, workers: int, pin_memory: bool
) -> "DataLoader[_Outcome]":
    return DataLoader(
        samples,
        sampler=sampler,
        batch_size=None,  # the sampler gives whole micro-batches
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_one_thread,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else it draws from torch's global generator
    )


def _as_it_is(outcome: Any) -> Any:
    return outcome


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)  # torch's default is all cores in every worker
