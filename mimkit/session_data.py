"""The images of a training, and how a rank gets them: in batches, to train on and to judge by."""

import os
import platform
from collections.abc import Callable, Iterator

from mimkit import build
from mimkit.batch import Batch
from mimkit.config import Config, DataConfig, FinetuneConfig, TokenizerConfig
from mimkit.data.loader import BatchLoader, OnBadSample, TokenRows, eval_loader, train_loader
from mimkit.data.sources import Source
from mimkit.data.views import ViewMaker
from mimkit.errors import found_by_all
from mimkit.masks import Mask
from mimkit.train.bad_samples import BadSamples
from mimkit.train.runtimes import Runtime
from mimkit.train.sharing import told_once

AnyConfig = Config | TokenizerConfig | FinetuneConfig  # of a training
_MOST_WARNINGS = 10  # of a rank, about bad samples; all are counted


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


class SessionData:
    """Both sets of images, and this rank's batches of them.

    Args:
        config: of a pretraining, a tokenizer's training or a finetuning.
        views: sizes and interpolations of the views; None where the caller makes its views itself.
        micro_batch: images of a rank in one forward.
        bad_samples: is told how many could not be decoded.
        warn: is told which.

    Raises:
        UserError: the data cannot be read, or other machines have other images.
    """

    def __init__(
        self,
        config: AnyConfig,
        runtime: Runtime,
        *,
        views: DataConfig | None,
        micro_batch: int,
        bad_samples: BadSamples,
        warn: Callable[[str], None],
    ) -> None:
        self._config, self._runtime, self._views = config, runtime, views
        self._micro_batch, self._bad_samples, self._warn = micro_batch, bad_samples, warn
        self.train, self.heldout = self._open()
        self._agree()

    def _open(self) -> tuple[Source, Source | None]:
        """First the first rank of every machine: it writes indexes and the embedded shards where
        there are none yet. Machines need not share a disk, but must have the same images."""
        opened = None
        for turn in (True, False):
            with told_once(self._runtime):
                if (self._runtime.local_rank == 0) is turn:
                    opened = build.build_data(self._config.data)
        assert opened is not None
        return opened

    def _agree(self) -> None:
        heldout = None if self.heldout is None else self.heldout.digest
        first, *others = self._runtime.gather((platform.node(), self.train.digest, heldout))
        for rank, other in enumerate(others, 1):
            if other[1:] != first[1:]:
                which = "train" if other[1] != first[1] else "heldout"
                raise found_by_all(
                    f"data.{which} has other images on rank {rank} (machine {other[0]}) than on "
                    f"rank 0 (machine {first[0]}): their digests differ. Give every machine the "
                    "same shards",
                    speaks=self._runtime.rank == 0,
                )

    @property
    def judged(self) -> Source:
        """What pictures and measures are made of: held-out images where there are any."""
        return self.heldout or self.train

    @property
    def workers(self) -> int:
        """Loader processes of this rank."""
        if self._config.engine.workers is not None:
            return self._config.engine.workers
        if self._runtime.device.type == "cpu":
            return 1  # the cores train; one process keeps the next batch ready
        return min(16, max(1, cores() // self._runtime.local_world))

    def batches(
        self,
        mask: Mask | None,
        *,
        position: int,
        tokens: TokenRows | None = None,
        view: ViewMaker | None = None,
        repeats: int = 1,
    ) -> Iterator[Batch]:
        """The endless stream of this rank's micro-batches.

        Args:
            position: samples of all ranks consumed before.
            tokens: of a bank; then no token view is rendered.
            view: in place of pretraining's two views.
            repeats: views of a sample side by side, see `Order`.
        """
        if view is None:
            assert self._views is not None
            view = build.build_views(self._views, "both" if tokens is None else "patches")
        loader = train_loader(
            source=self.train,
            views=view,
            repeats=repeats,
            tokens=tokens,
            mask=mask,
            seed=self._config.seed,
            view_seed=self._config.data.view_seed,
            batch_size=self._micro_batch,
            rank=self._runtime.rank,
            world=self._runtime.world,
            position=position,
            window=self._config.data.window,
            workers=self.workers,
            on_bad_sample=self._config.data.on_bad_sample,
            pin_memory=self._runtime.device.type == "cuda",
            read_ahead=self._runtime.local_rank == 0,
            local_world=self._runtime.local_world,
        )
        return self._watched(loader)

    def _watched(self, loader: BatchLoader) -> Iterator[Batch]:
        """Counts the bad samples, and names the first of them."""
        for batch in loader:
            self._bad_samples.note(len(loader.bad))
            before = loader.num_substituted - len(loader.bad)
            for count, cause in enumerate(loader.bad, before + 1):
                more = " (more are counted only)" if count == _MOST_WARNINGS else ""
                if count <= _MOST_WARNINGS:
                    self._warn(f"warning: the next sample stands in for {cause}{more}")
            yield batch

    def fixed_batches(
        self,
        source: Source,
        mask: Mask | None,
        *,
        limit: int,
        alone: bool = False,
        tokens: TokenRows | None = None,
        view: ViewMaker | None = None,
        batch_size: int | None = None,
    ) -> Iterator[Batch]:
        """Centre views and masks of the first `limit` images, the same at every call.

        Args:
            alone: every rank gets all of them instead of its share.
            tokens: of a bank; then no token view is rendered.
            view: in place of pretraining's centre views.
            batch_size: of a rank; None for that of training.
        """
        if view is None:
            assert self._views is not None
            view = build.build_probe_view(self._views, "both" if tokens is None else "patches")
        loader = eval_loader(
            source=source,
            view=view,
            tokens=tokens,
            mask=mask,
            seed=self._config.seed,
            batch_size=min(batch_size or self._micro_batch, limit),
            rank=0 if alone else self._runtime.rank,
            world=1 if alone else self._runtime.world,
            workers=0 if alone else self.workers,
            limit=limit,
            on_bad_sample=self._on_bad_sample(source),
            local_world=self._runtime.local_world,
        )
        return iter(loader)

    def _on_bad_sample(self, source: Source) -> OnBadSample:
        """Others may stand in for images to train on; those that are judged by count once each."""
        return self._config.data.on_bad_sample if source is self.train else "raise"
