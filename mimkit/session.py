"""What every training has in common: ranks, run folder, sample stream, checkpoints, the loop."""

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mimkit import build, runs
from mimkit.batch import Batch
from mimkit.config import Config, DataConfig, FinetuneConfig, TokenizerConfig
from mimkit.data.loader import BatchLoader, OnBadSample, TokenRows, eval_loader, train_loader
from mimkit.data.overlap import shared_images
from mimkit.data.sources import Source
from mimkit.data.views import ViewMaker
from mimkit.errors import Interrupted, found_by_all
from mimkit.files import write_text
from mimkit.interrupts import StopRequests
from mimkit.masks import Mask
from mimkit.runs import RunFolder
from mimkit.train import checkpoint
from mimkit.train.average import WeightAverage
from mimkit.train.bad_samples import BadSamples
from mimkit.train.flight import KEPT, FlightRecorder
from mimkit.train.loop import Hook, Moment, Plan, divide_batch, train
from mimkit.train.metrics import Meter, Recorder
from mimkit.train.nonfinite import NAME as NONFINITE
from mimkit.train.nonfinite import NonFinite
from mimkit.train.runtimes import RUNTIMES, Runtime, UpdateRule
from mimkit.train.saving import BackgroundSaver
from mimkit.train.sharing import load_everywhere, told_once
from mimkit.train.step import StepResult
from mimkit.train.stopwatch import Stopwatch

_MOST_WARNINGS = 10  # of a rank, about bad samples; all are counted


@dataclass(frozen=True)
class Data:
    train: Source
    heldout: Source | None


class Session:
    """One training on one rank, from the start of the engine to the last checkpoint.

    Args:
        config: of a pretraining, a tokenizer's training or a finetuning.
        views: sizes and interpolations of the views; those of `config` where both are used. None
            where the caller makes its views itself.
        bf16: whether forward runs under bf16 autocast.
        started_at: when the command was given, seconds since the epoch.

    Raises:
        UserError: the batch does not divide, the DeepSpeed JSON contradicts, the data cannot be
            read, the folder is another run's or in use.
    """

    def __init__(
        self,
        config: Config | TokenizerConfig | FinetuneConfig,
        *,
        views: DataConfig | None,
        bf16: bool,
        started_at: float,
    ) -> None:
        self.config, self.views, self.started_at = config, views, started_at
        build.check_splits(config.data)
        self.runtime: Runtime = RUNTIMES[config.engine.runtime](timeout=config.engine.timeout)
        torch.set_num_threads(config.engine.threads or max(1, _cores() // self.runtime.local_world))
        with self.told_once():
            self.rule = self._update_rule(bf16)
            self.runtime.check(self.rule)
        self.data = self._open_data()
        chosen: RunFolder | None = None
        self._lock: runs.Lock | None = None
        with self.told_once():
            if self.is_first:
                chosen, self._lock = self._choose_folder()
        self.folder: RunFolder = self.runtime.from_rank_0(chosen)
        self.plan = Plan(
            steps=build.num_steps(config.train, self.data.train.epoch_length),
            batch_size=config.train.batch_size,
            micro_batch=self.rule.micro_batch,
            accumulation=self.rule.accumulation,
            log_every=config.output.log_every,
        )
        self.start = self._applied = 0  # updates done, and those that the optimizer made
        self._ahead = 0  # samples consumed beyond those of the updates: after a way back
        self._meter = Meter()
        self.nonfinite = NonFinite(
            policy=config.train.on_nonfinite, allowed=config.train.max_nonfinite,
            told=self._tell_flight, go_back=self._go_back, speaks=self.is_first,
        )  # fmt: skip
        self._saver = BackgroundSaver(self._write_checkpoint, told=self._tell_saved)
        self.bad_samples = BadSamples(
            before=0, allowed=config.data.max_bad_samples, speaks=self.is_first
        )
        self.average: WeightAverage | None = None
        self.flight = self._flight_recorder()
        self.stopwatch = Stopwatch()
        self.recorder: Recorder | None = None
        self.summary: dict[str, Any] = {}

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and speaks."""
        return self.runtime.rank == 0

    def told_once(self) -> AbstractContextManager[None]:
        """Around what every rank checks, or one for all; see `sharing.told_once`."""
        return told_once(self.runtime)

    def _choose_folder(self) -> tuple[RunFolder, runs.Lock | None]:
        """Locked, save where the run is finished."""
        folder = runs.choose_run_folder(self.config)
        return folder, None if folder.finished else runs.lock(folder)

    def _flight_recorder(self) -> FlightRecorder:
        facts = {
            "seed": self.config.seed, "batch_size": self.plan.batch_size,
            "micro_batch": self.plan.micro_batch, "accumulation": self.plan.accumulation,
            "epoch_length": self.data.train.epoch_length,
            "precision": "bf16" if self.rule.bf16 else "fp32",
            "clip_grad": self.rule.clip_grad, "zero_stage": self.rule.zero_stage,
            "runtime": self.config.engine.runtime, "device": self.runtime.device.type,
        }  # fmt: skip
        return FlightRecorder(
            self.folder.path, rank=self.runtime.rank, world=self.runtime.world, facts=facts,
            kept=max(KEPT, 2 * self.plan.log_every),
        )  # fmt: skip

    def _update_rule(self, bf16: bool) -> UpdateRule:
        engine = self.config.engine
        micro = divide_batch(
            self.config.train.batch_size,
            world=self.runtime.world,
            accumulation=engine.accumulation,
        )
        return UpdateRule(
            micro_batch=micro,
            accumulation=engine.accumulation,
            clip_grad=self.config.train.clip_grad,
            bf16=bf16,
            zero_stage=engine.zero_stage,
            deepspeed_config=build.deepspeed_file(engine),
        )

    def _open_data(self) -> Data:
        """First the first rank of every machine: it writes indexes and the embedded shards where
        there are none yet. Machines need not share a disk, but must have the same images."""
        opened = None
        for turn in (True, False):
            with self.told_once():
                if (self.runtime.local_rank == 0) is turn:
                    opened = Data(*build.build_data(self.config.data))
        assert opened is not None
        heldout = None if opened.heldout is None else opened.heldout.digest
        mine = platform.node(), opened.train.digest, heldout
        first, *others = self.runtime.gather(mine)
        for rank, other in enumerate(others, 1):
            if other[1:] != first[1:]:
                which = "train" if other[1] != first[1] else "heldout"
                raise found_by_all(
                    f"data.{which} has other images on rank {rank} (machine {other[0]}) than on "
                    f"rank 0 (machine {first[0]}): their digests differ. Give every machine the "
                    "same shards",
                    speaks=self.is_first,
                )
        return opened

    @property
    def workers(self) -> int:
        """Loader processes of this rank."""
        if self.config.engine.workers is not None:
            return self.config.engine.workers
        if self.runtime.device.type == "cpu":
            return 1  # the cores train; one process keeps the next batch ready
        return min(16, max(1, _cores() // self.runtime.local_world))

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, ema: float | None = None
    ) -> None:
        """Hands both to the engine; where the run was interrupted, as they were then.

        Args:
            ema: decay of an average of the weights, which every update advances (train.ema).
        """
        before = None
        if self.folder.continues is not None:
            before = load_everywhere(self.folder.continues, self.runtime)  # rank 0 checked
            model.load_state_dict(dict(before.weights))
            self._go_on_from(before)
        with self.told_once():
            if self.is_first:
                self._check_space(model, ema=ema is not None)
        self.runtime.prepare(model, optimizer, self.rule)
        if before is not None:
            self.runtime.restore(before.moments, updates=self._applied)
        if ema is not None:
            start = None if before is None else before.average
            self.average = WeightAverage(self.runtime, decay=ema, start=start)
        self.runtime.model.train()
        self.optimizer = optimizer

    def _go_on_from(self, before: checkpoint.Checkpoint) -> None:
        """Counts, and what the next line of metrics is to be made of besides."""
        self.start = before.updates
        self._applied = before.updates if before.applied is None else before.applied
        self._ahead = before.position - before.updates * self.plan.batch_size
        self.bad_samples.total, self.nonfinite.total = before.bad_samples, before.nonfinite
        pending, rank = before.pending, self.runtime.rank
        same = len(pending) == self.runtime.world
        for of_rank in [pending[rank]] if same else pending if self.is_first else []:
            self._meter.put_back(of_rank["sums"], self.runtime.device)
            self.bad_samples.note(of_rank["bad"])

    def _check_space(self, model: nn.Module, *, ema: bool) -> None:
        """UserError in the first seconds where the disk cannot hold what will be kept."""
        most = most_checkpoints(self.config, self.plan.steps)
        one = checkpoint.expected_bytes(model, average=ema)
        new = most - checkpoint.count(self.folder.checkpoints)
        checkpoint.check_space(
            self.folder.checkpoints, max(new, 1) * one,
            why=f"the run has up to {most} checkpoints of {one / 2**20:.0f} MiB at once, and",
        )  # fmt: skip

    def judged_weights(self) -> AbstractContextManager[None]:
        """The model has the average of the weights inside, where one is kept; all ranks enter."""
        return nullcontext() if self.average is None else self.average.in_place()

    def averaged_weights(self) -> dict[str, Tensor] | None:
        """The whole average, on every rank, which all must ask; None where none is kept."""
        return None if self.average is None else self.average.whole()

    def _rate(self) -> str:
        """As it is set, never scaled; per 256 images, so that recipes can be compared."""
        train = self.config.train
        per_256 = train.lr * 256 / train.batch_size
        decay = f"{train.weight_decay:g}" + (
            "" if train.weight_decay_end is None else f" to {train.weight_decay_end:g}"
        )
        return (f"{train.lr:g} for the batch of {train.batch_size} ({per_256:.3g} per 256 images), "
                f"down to {train.min_lr:g}, warm-up {round(train.warmup * self.plan.steps)} steps; "
                f"weight decay {decay}")  # fmt: skip

    def announce(self, *, what: str, facts: Mapping[str, Any]) -> None:
        """Rank 0 writes the start of the run folder and says what is about to happen."""
        if not self.is_first:
            return
        heldout = self.data.heldout
        facts = {"train_digest": self.data.train.digest,
                 "heldout_digest": heldout.digest if heldout else None,
                 "precision": "bf16" if self.rule.bf16 else "fp32", **facts}  # fmt: skip
        changed = runs.write_start(self.folder, self.config, facts=facts)
        engine = json.dumps(self.runtime.effective_settings(), indent=2, default=str)
        write_text(self.folder.path / "engine.json", engine)
        length = self.data.train.epoch_length
        epochs = self.plan.steps * self.plan.batch_size / length
        weighted = f", {length} an epoch" if length != len(self.data.train) else ""
        lines = [
            f"mimkit: {what}",
            f"{len(self.data.train)} images{weighted}; {self.runtime.world} x "
            f"{self.runtime.device.type}, {'bf16' if self.rule.bf16 else 'fp32'}, "
            f"{self.config.engine.runtime}, global batch {self.plan.batch_size}, "
            f"{self.plan.steps} steps ({epochs:.1f} epochs)",
            f"learning rate {self._rate()}",
            f"run folder: {self.folder.path}",
        ]
        if self.start:
            sample = self.start * self.plan.batch_size + self._ahead
            lines.append(f"continuing from {self.folder.continues}: update {self.start} of "
                         f"{self.plan.steps}, sample {sample}")  # fmt: skip
            lines += [f"  passed over: {reason}" for reason in self.folder.passed_over]
            settings = runs.changed_settings(self.folder, self.config)
            if settings:
                lines.append(f"  other settings than at first, which change no number of it: "
                             f"{'; '.join(settings)}")  # fmt: skip
        if heldout is not None and (shared := shared_images(self.data.train, heldout)).same:
            self.summary["heldout_images_trained_on"] = shared.estimate
            lines.append(
                f"warning: about {shared.estimate} of the {len(heldout)} images in data.heldout "
                f"are trained on ({shared.same} of {shared.compared} that were compared, by key "
                "and bytes): numbers of them prove nothing. See mimkit audit shards --against"
            )
        if changed:
            lines.append(f"warning: since this run began, what differs is: {'; '.join(changed)}")
        print("\n".join(lines), flush=True)
        self.recorder = Recorder(self.folder.path, start=self.start, steps=self.plan.steps,
                                 tensorboard=self.config.output.tensorboard)  # fmt: skip

    def batches(
        self,
        mask: Mask | None,
        *,
        tokens: TokenRows | None = None,
        view: ViewMaker | None = None,
        repeats: int = 1,
    ) -> Iterator[Batch]:
        """The endless stream of this rank's micro-batches, from where the run stands.

        Args:
            tokens: of a bank; then no token view is rendered.
            view: in place of pretraining's two views.
            repeats: views of a sample side by side, see `Order`.
        """
        if view is None:
            assert self.views is not None
            view = build.build_views(self.views, "both" if tokens is None else "patches")
        loader = train_loader(
            source=self.data.train,
            views=view,
            repeats=repeats,
            tokens=tokens,
            mask=mask,
            seed=self.config.seed,
            view_seed=self.config.data.view_seed,
            batch_size=self.rule.micro_batch,
            rank=self.runtime.rank,
            world=self.runtime.world,
            position=self.start * self.plan.batch_size + self._ahead,
            window=self.config.data.window,
            workers=self.workers,
            on_bad_sample=self.config.data.on_bad_sample,
            pin_memory=self.runtime.device.type == "cuda",
            read_ahead=self.runtime.local_rank == 0,
            local_world=self.runtime.local_world,
        )
        return self._watched(loader)

    def _watched(self, loader: BatchLoader) -> Iterator[Batch]:
        """Notes when the first update is done (the second one asks for its batch), and which
        samples were bad."""
        for number, batch in enumerate(loader):
            if number == self.plan.accumulation:
                elapsed = time.time() - self.started_at
                self.summary["seconds_to_first_step"] = round(elapsed, 2)
            self._note_bad(loader)
            yield batch

    def _note_bad(self, loader: BatchLoader) -> None:
        self.bad_samples.note(len(loader.bad))
        before = loader.num_substituted - len(loader.bad)
        for count, cause in enumerate(loader.bad, before + 1):
            more = " (more are counted only)" if count == _MOST_WARNINGS else ""
            if count <= _MOST_WARNINGS:
                self._warn(f"warning: the next sample stands in for {cause}{more}")

    def _warn(self, text: str) -> None:
        if self.recorder is not None:
            self.recorder.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

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
            assert self.views is not None
            view = build.build_probe_view(self.views, "both" if tokens is None else "patches")
        loader = eval_loader(
            source=source,
            view=view,
            tokens=tokens,
            mask=mask,
            seed=self.config.seed,
            batch_size=min(batch_size or self.rule.micro_batch, limit),
            rank=0 if alone else self.runtime.rank,
            world=1 if alone else self.runtime.world,
            workers=0 if alone else self.workers,
            limit=limit,
            on_bad_sample=self._on_bad_sample(source),
            local_world=self.runtime.local_world,
        )
        return iter(loader)

    def _on_bad_sample(self, source: Source) -> OnBadSample:
        """Others may stand in for images to train on; those that are judged by count once each."""
        return self.config.data.on_bad_sample if source is self.data.train else "raise"

    @property
    def judged(self) -> Source:
        """What pictures and measures are made of: held-out images where there are any."""
        return self.data.heldout or self.data.train

    def train(
        self,
        step: Callable[[Batch, Moment], StepResult],
        batches: Iterator[Batch],
        *,
        hooks: Sequence[Hook],
        after_update: Callable[[int], None] | None = None,
    ) -> dict[str, Tensor]:
        """Every update that is left, with checkpoints; returns the whole trained weights.

        `after_update` takes the updates done before the one that was just made.
        """
        output = self.config.output
        substitutes = self.config.data.on_bad_sample == "substitute"
        if self.nonfinite.policy == "rollback" and self.folder.continues is None:
            self._save(0)  # there must be something to go back to
        with StopRequests() as stop, self._saver, self.flight.watch(), stop.explaining():
            done = train(
                runtime=self.runtime,
                optimizer=self.optimizer,
                step=partial(self._recorded, step),
                batches=batches,
                plan=self.plan,
                learning_rate=build.build_schedule(self.config.train, self.plan.steps),
                weight_decay=build.build_weight_decay(self.config.train, self.plan.steps),
                start=self.start,
                hooks=self._timed([*hooks, Hook(output.checkpoint_every, self._save)]),
                recorder=self.recorder,
                after_update=partial(self._after_update, after_update),
                bad_samples=self.bad_samples if substitutes else None,
                nonfinite=self.nonfinite,
                meter=self._meter,
                stop=partial(self._asked_to_stop, stop),
            )
            self._saver.wait()
            if done.stopped:
                self._leave(stop, done.updates)
        if self.start == self.plan.steps:  # stopped between the last checkpoint and the summary
            for hook in hooks:
                hook.action(self.start)
        self.summary["substituted_samples"] = self.bad_samples.total
        self.summary |= {"steps": self.plan.steps, "images_per_second": round(done.rate, 2) or None}
        if self.nonfinite.policy != "stop":
            self.summary[NONFINITE] = self.nonfinite.total
        if self.recorder is not None:
            self.recorder.close()
        return self.runtime.weights()

    def _timed(self, hooks: Sequence[Hook]) -> list[Hook]:
        """The same, by the stopwatch; each under the name of what it does."""

        def timed(hook: Hook) -> Hook:
            name = getattr(hook.action, "__name__", "other").strip("_")

            def action(updates: int) -> None:
                with self.stopwatch.lap(name):
                    hook.action(updates)

            return Hook(hook.every, action)

        return [timed(hook) for hook in hooks]

    def _after_update(self, more: Callable[[int], None] | None, updates: int) -> None:
        if self.average is not None:
            self.average.advance(updates)
        if more is not None:
            more(updates)
        self._applied += 1
        self._tell_flight()

    def _tell_flight(self) -> None:
        """The update is over, whether it was made or not."""
        self.flight.end(
            optimizer=self.optimizer, grad_norm=self.runtime.grad_norm, parts=self.runtime.parts()
        )

    def _asked_to_stop(self, stop: StopRequests) -> bool:
        self._saver.look()
        return stop.asked()

    def _leave(self, stop: StopRequests, updates: int) -> NoReturn:
        """Every rank, after the same update: saves, and says how it was left."""
        self._save(updates)
        self._saver.wait()
        if self.recorder is not None:
            self.recorder.close()
        signals = [name for name in self.runtime.gather(stop.signal) if name is not None]
        raise Interrupted(signals[0], f"saved after update {updates} of {self.plan.steps} in "
                          f"{self.folder.checkpoints}")  # fmt: skip

    def _recorded(
        self, step: Callable[[Batch, Moment], StepResult], batch: Batch, moment: Moment
    ) -> StepResult:
        """`step`, told to the flight recorder."""
        self.flight.begin(batch, updates=moment.updates, first_row=moment.rows.start)
        result = step(batch, moment)
        self.flight.loss(result.loss)
        return result

    def record(self, updates: int, values: Mapping[str, float]) -> None:
        """Held-out numbers: into the metrics and, the last ones, into the summary."""
        self.summary |= values
        if self.recorder is not None:
            self.recorder.write(updates, values, kind="heldout")

    def _save(self, updates: int) -> None:
        """All ranks gather, which takes a moment; rank 0 writes while training goes on."""
        started = time.perf_counter()
        pending = {"sums": self._meter.pending(), "bad": self.bad_samples.unshared}
        state = checkpoint.Checkpoint(
            updates=updates,
            position=updates * self.plan.batch_size + self._ahead,
            weights=self.runtime.weights(),
            moments=self.runtime.moments(),
            bad_samples=self.bad_samples.total,
            nonfinite=self.nonfinite.total,
            applied=self._applied,
            pending=self.runtime.gather(pending),
            average=self.averaged_weights(),
        )
        if self.is_first:
            self._saver.start(state)
        self._stall = time.perf_counter() - started

    def _write_checkpoint(self, state: checkpoint.Checkpoint) -> checkpoint.Saved:
        output = self.config.output
        return checkpoint.save(self.folder.checkpoints, state, keep=output.keep_checkpoints,
                               keep_every=output.keep_every)  # fmt: skip

    def _tell_saved(self, state: checkpoint.Checkpoint, saved: checkpoint.Saved) -> None:
        if self.recorder is not None:
            values = {"mebibytes": round(saved.bytes / 2**20, 3), "seconds": saved.seconds,
                      "stalled_seconds": self._stall}  # fmt: skip
            self.recorder.write(state.updates, values, kind="checkpoint")

    def _go_back(self, done: int) -> int:
        """To the newest checkpoint, from update number `done` that was not made.

        Samples are not gone back to: the same ones would fail again. Counts stay.
        """
        self._saver.wait()
        path = self.runtime.from_rank_0(
            checkpoint.newest_sound(self.folder.checkpoints).path if self.is_first else None
        )
        before = load_everywhere(path, self.runtime)
        self.runtime.go_back(before.weights)
        self._applied = before.updates if before.applied is None else before.applied
        self.runtime.restore(before.moments, updates=self._applied)
        if before.average is not None and self.average is not None:
            self.average.set(before.average)
        self._ahead += (done - before.updates) * self.plan.batch_size
        return before.updates

    @contextmanager
    def tidy(self) -> Iterator[None]:
        """Around all that a run does: a start that is refused leaves no empty folder behind."""
        try:
            yield
        finally:
            if self._lock is not None:
                with suppress(OSError):  # it must not hide what the start was refused for
                    runs.remove_if_empty(self.folder, self._lock)

    def close(self) -> None:
        """Ends the engine; afterwards ranks work on their own."""
        self.summary["peak_memory_mib"] = max(self.runtime.gather(peak_memory()))
        self.runtime.close()

    def finish(self) -> None:
        """Rank 0: the summary, which makes the run a finished one."""
        self.summary["seconds"] = self.stopwatch.numbers()
        most = max(self.summary["peak_memory_mib"], peak_memory())  # rank 0 may have worked since
        self.summary["peak_memory_mib"] = most
        write_text(self.folder.path / "summary.json", json.dumps(self.summary, indent=2))
        assert self._lock is not None
        self._lock.close()


def most_checkpoints(config: Config | TokenizerConfig | FinetuneConfig, steps: int) -> int:
    """At once, in a run of so many updates; that which is being written too."""
    output, every = config.output, config.output.checkpoint_every
    first = [0] if config.train.on_nonfinite == "rollback" else []
    last = [steps] if steps % every else []
    return checkpoint.most_at_once(
        [*first, *range(every, steps + 1, every), *last],
        keep=output.keep_checkpoints, keep_every=output.keep_every,
    )  # fmt: skip


def peak_memory() -> int:
    """MiB, of this process so far: of the GPU where there is one, else resident memory without that
    of loader processes."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved() >> 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _cores() -> int:
    return len(os.sched_getaffinity(0))
