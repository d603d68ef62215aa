"""Batches for one rank: an endless stream for training, one pass for evaluation.

Who computes what (ranks, workers, batch size) is arithmetic on one position; what a sample looks
like depends on (seed, epoch, sample, copy) only. So a position is the whole state of the data.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mimkit.batch import Batch, Item, Sample, Views, collate
from mimkit.data._lost_workers import told_of_lost_workers
from mimkit.data._shared_memory import check_shared_memory
from mimkit.data.ahead import Ahead
from mimkit.data.decode import DecodeError
from mimkit.data.order import Order
from mimkit.data.sampler import EvalSampler, MicroBatch, Share, Slot, TrainSampler, first_samples
from mimkit.data.sources import Source
from mimkit.data.views import ViewMaker
from mimkit.errors import UserError
from mimkit.interrupts import ignore_signals
from mimkit.random import Purpose, Rng, generator

MaskMaker = Callable[[Rng], NDArray[np.bool_]]
TokenRows = Callable[[int, int], NDArray[np.uint16]]  # (epoch, row) of a token bank -> tokens_N
OnBadSample = Literal["raise", "substitute"]
PADDING = -1  # index_B of what only fills a batch of an evaluation
_PREFETCH = 2  # batches that a worker makes ahead
_MOST_SUBSTITUTES = 16  # neighbours tried; more in a row is a damaged set, not a bad image


class BatchLoader:
    """Iterates over `Batch`es; errors of the workers arrive as they were raised.

    Attributes:
        num_substituted: bad samples that were replaced in the batches given out so far.
        bad: which were replaced in the batch given out last, and why.
    """

    def __init__(
        self,
        loader: "DataLoader[_Outcome]",
        *,
        num_batches: int | None,
        local_world: int,
        ahead: Ahead | None = None,
    ) -> None:
        self._loader, self._num_batches = loader, num_batches
        self._local_world, self._ahead = local_world, ahead
        self.num_substituted = 0
        self.bad: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Batch]:
        if self._loader.num_workers:
            _rehearse(self._loader, local_world=self._local_world)
        outcomes = told_of_lost_workers(self._loader)  # starts them, before there are threads
        for outcome in outcomes if self._ahead is None else self._ahead.follow(outcomes):
            if outcome.error is not None:
                raise UserError(outcome.error)
            assert outcome.batch is not None
            self.bad = outcome.bad
            self.num_substituted += len(outcome.bad)
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
    local_world: int = 1,
    read_ahead: bool = True,
    tokens: TokenRows | None = None,
    repeats: int = 1,
    view_seed: int | None = None,
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
        local_world: ranks on this machine, which share its memory.
        read_ahead: bring the next shards near, see `Ahead`; one rank of a machine does it for all.
        tokens: of a bank, by epoch and row (`Slot.row`); they go into `Batch.token_BN`.
        repeats: views of a sample side by side, see `Order`.
        view_seed: the key of the views, where it is not `seed`.

    Raises:
        UserError: at once, where the cache of fetched shards is too small; while iterating, for a
            sample that cannot be read or decoded; at the first batch, where the workers would not
            have enough shared memory.
    """
    order = Order(groups=source.groups, seed=seed, window=window, sets=source.sets, repeats=repeats)
    share = Share(batch_size=batch_size, rank=rank, world=world)
    keys = _Keys(seed, seed if view_seed is None else view_seed)
    samples = _Samples(source, views, mask, keys, on_bad_sample, tokens)
    sampler = TrainSampler(order=order, share=share, position=position)
    loader = _loader(samples, sampler, workers, pin_memory)
    step, ahead = world * batch_size, None
    if read_ahead:
        lead = (_PREFETCH * workers + 1) * step
        ahead = Ahead(
            source=source, order=order, position=position, step=step, lead=lead, window=window
        )
    return BatchLoader(loader, num_batches=None, local_world=local_world, ahead=ahead)


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
    on_bad_sample: OnBadSample = "raise",
    pin_memory: bool = False,
    local_world: int = 1,
    tokens: TokenRows | None = None,
) -> BatchLoader:
    """The first `limit` samples (all by default), each once over all ranks, the same every time.

    Of a mixture each set gives its share of the limit, and weights do not count. Every rank gets
    equally many full batches; `index_B` is PADDING where a sample only fills one. Views and masks
    are drawn as in epoch 0.

    Args:
        on_bad_sample: see `train_loader`; with substitutes not every sample is another one.
        tokens: see `train_loader`; epoch 0 of a bank.

    Raises:
        UserError: while iterating, see `train_loader`.
    """
    chosen = first_samples(source.sets, len(source) if limit is None else limit)
    share = Share(batch_size=batch_size, rank=rank, world=world)
    sampler = EvalSampler(samples=chosen, share=share)
    samples = _Samples(source, view, mask, _Keys(seed, seed), on_bad_sample, tokens)
    loader = _loader(samples, sampler, workers, pin_memory)
    return BatchLoader(loader, num_batches=len(sampler), local_world=local_world)


def slot_loader(
    *,
    source: Source,
    view: ViewMaker,
    seed: int,
    batches: Sequence[MicroBatch],
    workers: int,
    on_bad_sample: OnBadSample = "raise",
) -> BatchLoader:
    """The batches that are asked for, slot by slot, in that order.

    Raises:
        UserError: while iterating, see `train_loader`.
    """
    samples = _Samples(source, view, None, _Keys(seed, seed), on_bad_sample, None)
    loader = _loader(samples, batches, workers, pin_memory=False)
    return BatchLoader(loader, num_batches=len(batches), local_world=1)


@dataclass(frozen=True)
class _Outcome:
    """What a worker sends: a batch, or the message of an error.

    An exception would arrive with its traceback as the message.
    """

    batch: Batch | None = None
    error: str | None = None
    bad: tuple[str, ...] = ()

    def pin_memory(self) -> "_Outcome":  # called by the DataLoader
        batch = None if self.batch is None else self.batch.pin_memory()
        return _Outcome(batch, self.error, self.bad)


class _Keys(NamedTuple):
    """Seeds of what is drawn for a sample."""

    seed: int
    views: int


@dataclass(frozen=True)
class _Samples(Dataset[_Outcome]):
    """Micro-batches by their list of slots; runs in the workers."""

    source: Source
    views: ViewMaker
    mask: MaskMaker | None
    keys: _Keys
    on_bad_sample: OnBadSample
    tokens: TokenRows | None

    def __getitem__(self, slots: MicroBatch) -> _Outcome:
        try:
            items = [self._item(slot) for slot in slots]
        except UserError as error:
            return _Outcome(error=str(error))
        bad = tuple(cause for _, cause in items if cause is not None)
        return _Outcome(collate([item for item, _ in items]), bad=bad)

    def _item(self, slot: Slot) -> tuple[Item, str | None]:
        """And what is wrong with the sample of the slot if another one stands in."""
        most, bad = _MOST_SUBSTITUTES if self.on_bad_sample == "substitute" else 0, None
        for tried in range(most + 1):
            try:
                sample, views = self._read((slot.sample + tried) % len(self.source), slot)
                break
            except DecodeError as error:
                bad = bad or str(error)
                if tried == most:
                    raise UserError(_no_sample(error, most)) from error
        index = PADDING if slot.is_padding else sample.index
        return Item(views, self._mask(slot), sample.label, index, self._tokens(slot)), bad

    def _read(self, number: int, slot: Slot) -> tuple[Sample, Views]:
        """Sample `number` under the keys of `slot`. Raises DecodeError that names the sample."""
        sample = self.source[number]
        try:
            return sample, self.views(sample.image, self._rng(Purpose.VIEW, slot))
        except DecodeError as error:
            tar = self.source.tar_of(number)
            kept = "" if tar is None or tar.copy is None else (
                f" (read from its copy {tar.copy}: delete that if the server's file is sound)"
            )  # fmt: skip
            raise DecodeError(
                f"sample {sample.index}, key '{sample.key}', in {sample.origin}, cannot be "
                f"decoded: {error}{kept}"
            ) from error

    def _rng(self, purpose: Purpose, slot: Slot) -> Rng:
        key = slot.row(len(self.source))  # the copies of an epoch look different
        seed = self.keys.views if purpose is Purpose.VIEW else self.keys.seed
        return generator(purpose, seed=seed, epoch=slot.epoch, sample=key)

    def _tokens(self, slot: Slot) -> Tensor:
        if self.tokens is None:
            return torch.empty(0, dtype=torch.int32)
        tokens_N = self.tokens(slot.epoch, slot.row(len(self.source)))
        return torch.from_numpy(tokens_N.astype(np.int32))

    def _mask(self, slot: Slot) -> Tensor:
        if self.mask is None:
            return torch.empty(0, dtype=torch.bool)
        return torch.from_numpy(self.mask(self._rng(Purpose.MASK, slot)))


def _no_sample(last: DecodeError, most: int) -> str:
    tried = f" Nor can the {most} samples before it." if most else ""
    return (
        f"{last}.{tried} tools/make_shards.py writes shards without such images and lists them; "
        "data.on_bad_sample=substitute takes the next sample instead and counts it."
    )


def _loader(
    samples: _Samples,
    sampler: TrainSampler | EvalSampler | Sequence[MicroBatch],
    workers: int,
    pin_memory: bool,
) -> "DataLoader[_Outcome]":
    return DataLoader(
        samples,
        sampler=sampler,
        batch_size=None,  # the sampler gives whole micro-batches
        num_workers=workers,
        prefetch_factor=_PREFETCH if workers else None,
        collate_fn=_as_it_is,
        worker_init_fn=_start_worker,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else it draws from torch's global generator
    )


def _rehearse(loader: "DataLoader[_Outcome]", *, local_world: int) -> None:
    """Makes one sample here before there are workers: kernels are compiled once for all of them,
    and it tells what a batch takes of the shared memory."""
    slots = next(iter(loader.sampler), None)
    outcome = loader.dataset[slots[:1]] if slots else _Outcome()
    if slots and outcome.batch is not None:  # a bad sample is reported when its turn comes
        check_shared_memory(
            len(slots) * sum(field.nbytes for field in outcome.batch),
            prefetch=_PREFETCH,
            workers=loader.num_workers,
            ranks=local_world,
        )


def _as_it_is(outcome: Any) -> Any:
    return outcome


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)  # torch's default is all cores in every worker
    ignore_signals()
