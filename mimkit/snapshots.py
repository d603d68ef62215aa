"""A run's checkpoints: written while it trains, gone on from, gone back to."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mimkit.runs import RunFolder
from mimkit.session_data import AnyConfig
from mimkit.train import checkpoint
from mimkit.train.average import WeightAverage
from mimkit.train.checkpoint import Checkpoint
from mimkit.train.runtimes import Runtime
from mimkit.train.saving import BackgroundSaver
from mimkit.train.sharing import load_everywhere


@dataclass
class Progress:
    """How far a run has come, besides its number of updates."""

    batch_size: int
    start: int = 0  # updates done when this process took over
    applied: int = 0  # updates that the optimizer made
    ahead: int = 0  # samples consumed beyond those of the updates: after a way back

    def position(self, updates: int) -> int:
        """Samples of all ranks consumed by so many updates."""
        return updates * self.batch_size + self.ahead


class Snapshots:
    """Checkpoints of one run; every method is called on all ranks.

    Args:
        keep: so many of the newest stay.
        keep_every: and for good those whose updates are a multiple of this.
        progress: is set to that of the checkpoint that the run goes on from, or back to.
        tell: takes (updates, numbers) of a checkpoint that was written.
    """

    def __init__(
        self,
        runtime: Runtime,
        folder: RunFolder,
        *,
        keep: int,
        keep_every: int | None,
        progress: Progress,
        tell: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        self._runtime, self._folder = runtime, folder
        self._keep, self._keep_every = keep, keep_every
        self._progress, self._tell = progress, tell
        self.writing = BackgroundSaver(self._write, told=self._tell_saved)
        self._stall = 0.0

    def before(self) -> Checkpoint | None:
        """What the run goes on from; None at its beginning."""
        if self._folder.continues is None:
            return None
        before = load_everywhere(self._folder.continues, self._runtime)  # rank 0 checked
        self._take(before)
        self._progress.start = before.updates
        self._progress.ahead = before.position - before.updates * self._progress.batch_size
        return before

    def _take(self, before: Checkpoint) -> None:
        applied = before.applied
        self._progress.applied = before.updates if applied is None else applied

    def check_space(self, model: nn.Module, *, average: bool, most: int) -> None:
        """UserError in the first seconds where the disk cannot hold what will be kept; rank 0.

        Args:
            most: checkpoints at once.
        """
        one = checkpoint.expected_bytes(model, average=average)
        new = most - checkpoint.count(self._folder.checkpoints)
        checkpoint.check_space(
            self._folder.checkpoints, max(new, 1) * one,
            why=f"the run has up to {most} checkpoints of {one / 2**20:.0f} MiB at once, and",
        )  # fmt: skip

    def save(
        self,
        updates: int,
        *,
        pending: Mapping[str, Any],
        bad_samples: int,
        nonfinite: int,
        average: WeightAverage | None,
    ) -> None:
        """All ranks gather, which takes a moment; rank 0 writes while training goes on.

        Args:
            pending: this rank's part of a line of metrics that is not yet written.
        """
        started = time.perf_counter()
        state = Checkpoint(
            updates=updates,
            position=self._progress.position(updates),
            weights=self._runtime.weights(),
            moments=self._runtime.moments(),
            bad_samples=bad_samples,
            nonfinite=nonfinite,
            applied=self._progress.applied,
            pending=self._runtime.gather(pending),
            average=None if average is None else average.whole(),
        )
        if self._runtime.rank == 0:
            self.writing.start(state)
        self._stall = time.perf_counter() - started

    def _write(self, state: Checkpoint) -> checkpoint.Saved:
        return checkpoint.save(
            self._folder.checkpoints, state, keep=self._keep, keep_every=self._keep_every
        )

    def _tell_saved(self, state: Checkpoint, saved: checkpoint.Saved) -> None:
        size = round(saved.bytes / 2**20, 3)
        self._tell(state.updates, {"mebibytes": size, "seconds": saved.seconds,
                                   "stalled_seconds": self._stall})  # fmt: skip

    def go_back(self, done: int, *, average: WeightAverage | None) -> int:
        """To the newest checkpoint, from update number `done` that was not made; its updates.

        Samples are not gone back to: the same ones would fail again.
        """
        self.writing.wait()
        newest = None
        if self._runtime.rank == 0:
            newest = checkpoint.newest_sound(self._folder.checkpoints).path
        before = load_everywhere(self._runtime.from_rank_0(newest), self._runtime)
        self._runtime.go_back(before.weights)
        self._take(before)
        self._runtime.restore(before.moments, updates=self._progress.applied)
        if before.average is not None and average is not None:
            average.set(before.average)
        self._progress.ahead += (done - before.updates) * self._progress.batch_size
        return before.updates


def most_checkpoints(config: AnyConfig, steps: int) -> int:
    """At once, in a run of so many updates; that which is being written too."""
    output = config.output
    return checkpoint.most_at_once(
        _saved(config, steps), keep=output.keep_checkpoints, keep_every=output.keep_every
    )


def last_checkpoints(config: AnyConfig, steps: int) -> int:
    """That a run of so many updates leaves."""
    output = config.output
    return checkpoint.left_over(
        _saved(config, steps), keep=output.keep_checkpoints, keep_every=output.keep_every
    )


def _saved(config: AnyConfig, steps: int) -> list[int]:
    """The updates after which a checkpoint is written."""
    every = config.output.checkpoint_every
    first = [0] if config.train.on_nonfinite == "rollback" else []
    last = [steps] if steps % every else []
    return [*first, *range(every, steps + 1, every), *last]
