"""What every training has in common: ranks, run folder, images, checkpoints, the loop."""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mimkit import build, runs
from mimkit.batch import Batch
from mimkit.config import DataConfig
from mimkit.data.overlap import shared_images
from mimkit.errors import Interrupted
from mimkit.files import write_text
from mimkit.interrupts import StopRequests
from mimkit.runs import RunFolder
from mimkit.session_data import AnyConfig, SessionData, cores
from mimkit.snapshots import Progress, Snapshots, most_checkpoints
from mimkit.train.average import WeightAverage
from mimkit.train.bad_samples import BadSamples
from mimkit.train.checkpoint import Checkpoint
from mimkit.train.flight import KEPT, FlightRecorder
from mimkit.train.loop import Hook, Moment, Plan, divide_batch, train
from mimkit.train.metrics import Meter, Recorder
from mimkit.train.nonfinite import NAME as NONFINITE
from mimkit.train.nonfinite import NonFinite
from mimkit.train.runtimes import RUNTIMES, Runtime, UpdateRule
from mimkit.train.sharing import told_once
from mimkit.train.step import StepResult
from mimkit.train.stopwatch import Stopwatch


class Session:
    """One training on one rank, from the start of the engine to the last checkpoint.

    Args:
        config: of a pretraining, a tokenizer's training or a finetuning.
        views: sizes and interpolations of the views; those of `config` where both are used. None
            where the caller makes its views itself.
        bf16: whether forward runs under bf16 autocast.
        started_at: when the command was given, seconds since the epoch.
        folder: of the run; None chooses it by `config` and locks it.

    Raises:
        UserError: the batch does not divide, the DeepSpeed JSON contradicts, the data cannot be
            read, the folder is another run's or in use.
    """

    def __init__(
        self,
        config: AnyConfig,
        *,
        views: DataConfig | None,
        bf16: bool,
        started_at: float,
        folder: RunFolder | None = None,
    ) -> None:
        self.config, self.started_at = config, started_at
        self.recorder: Recorder | None = None
        self.summary: dict[str, Any] = {}
        build.check_splits(config.data)
        self.runtime: Runtime = RUNTIMES[config.engine.runtime](timeout=config.engine.timeout)
        torch.set_num_threads(config.engine.threads or max(1, cores() // self.runtime.local_world))
        with self.told_once():
            self.rule = self._update_rule(bf16)
            self.runtime.check(self.rule)
        self.bad_samples = BadSamples(
            before=0, allowed=config.data.max_bad_samples, speaks=self.is_first
        )
        self.data = SessionData(
            config, self.runtime, views=views, micro_batch=self.rule.micro_batch,
            bad_samples=self.bad_samples, warn=self._warn,
        )  # fmt: skip
        self._lock: runs.Lock | None = None
        self.folder = folder or self._choose_folder()
        self.plan = Plan(
            steps=build.num_steps(config.train, self.data.train.epoch_length),
            batch_size=config.train.batch_size,
            micro_batch=self.rule.micro_batch,
            accumulation=self.rule.accumulation,
            log_every=config.output.log_every,
        )
        self._progress = Progress(self.plan.batch_size)
        self.snapshots = Snapshots(
            self.runtime, self.folder, keep=config.output.keep_checkpoints,
            keep_every=config.output.keep_every, progress=self._progress,
            tell=partial(self._write_line, "checkpoint"),
        )  # fmt: skip
        self._meter = Meter()
        self.nonfinite = NonFinite(
            policy=config.train.on_nonfinite, allowed=config.train.max_nonfinite,
            told=self._tell_flight, go_back=self._go_back, speaks=self.is_first,
        )  # fmt: skip
        self.average: WeightAverage | None = None
        self.flight = self._flight_recorder()
        self.stopwatch = Stopwatch()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and speaks."""
        return self.runtime.rank == 0

    def told_once(self) -> AbstractContextManager[None]:
        """Around what every rank checks, or one for all; see `sharing.told_once`."""
        return told_once(self.runtime)

    @property
    def start(self) -> int:
        """Updates that were done before."""
        return self._progress.start

    @property
    def position(self) -> int:
        """Samples of all ranks that were consumed by then."""
        return self._progress.position(self.start)

    def _choose_folder(self) -> RunFolder:
        """Locked by rank 0, save where the run is finished."""
        chosen: RunFolder | None = None
        with self.told_once():
            if self.is_first:
                chosen = runs.choose_run_folder(self.config)
                runs.check_facts(chosen, build.code_digests(self.config))
                self._lock = None if chosen.finished else runs.lock(chosen)
        folder: RunFolder = self.runtime.from_rank_0(chosen)
        return folder

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

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, ema: float | None = None
    ) -> None:
        """Hands both to the engine; where the run was interrupted, as they were then.

        Args:
            ema: decay of an average of the weights, which every update advances (train.ema).
        """
        before = self.snapshots.before()
        if before is not None:
            model.load_state_dict(dict(before.weights))
            self._recall(before)
        with self.told_once():
            if self.is_first:
                most = most_checkpoints(self.config, self.plan.steps)
                self.snapshots.check_space(model, average=ema is not None, most=most)
        self.runtime.prepare(model, optimizer, self.rule)
        if before is not None:
            self.runtime.restore(before.moments, updates=self._progress.applied)
        if ema is not None:
            start = None if before is None else before.average
            self.average = WeightAverage(self.runtime, decay=ema, start=start)
        self.runtime.model.train()
        self.optimizer = optimizer

    def _recall(self, before: Checkpoint) -> None:
        """Counts, and what the next line of metrics is to be made of besides."""
        self.bad_samples.total, self.nonfinite.total = before.bad_samples, before.nonfinite
        pending, rank = before.pending, self.runtime.rank
        same = len(pending) == self.runtime.world
        for of_rank in [pending[rank]] if same else pending if self.is_first else []:
            self._meter.put_back(of_rank["sums"], self.runtime.device)
            self.bad_samples.note(of_rank["bad"])

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
                 "precision": "bf16" if self.rule.bf16 else "fp32",
                 **build.code_digests(self.config), **facts}  # fmt: skip
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
            lines.append(f"continuing from {self.folder.continues}: update {self.start} of "
                         f"{self.plan.steps}, sample {self.position}")  # fmt: skip
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
                "and bytes), so held-out numbers flatter. See mimkit audit shards --against"
            )
        if self.plan.batch_size > length:
            lines.append(f"warning: a batch has {self.plan.batch_size} samples and an epoch "
                         f"{length}: each batch has some of them more than once")  # fmt: skip
        if changed:
            lines.append(f"warning: since this run began, what differs is: {'; '.join(changed)}")
        print("\n".join(lines), flush=True)
        self.recorder = Recorder(self.folder.path, start=self.start, steps=self.plan.steps,
                                 tensorboard=self.config.output.tensorboard)  # fmt: skip

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
        with StopRequests() as stop, self.snapshots.writing, self.flight.watch(), stop.explaining():
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
            self.snapshots.writing.wait()
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
        self._progress.applied += 1
        elapsed = time.time() - self.started_at
        self.summary.setdefault("seconds_to_first_step", round(elapsed, 2))
        self._tell_flight()

    def _tell_flight(self) -> None:
        """The update is over, whether it was made or not."""
        self.flight.end(
            optimizer=self.optimizer, grad_norm=self.runtime.grad_norm, parts=self.runtime.parts()
        )

    def _asked_to_stop(self, stop: StopRequests) -> bool:
        self.snapshots.writing.look()
        return stop.asked()

    def _leave(self, stop: StopRequests, updates: int) -> NoReturn:
        """Every rank, after the same update: saves, and says how it was left."""
        self._save(updates)
        self.snapshots.writing.wait()
        if self.recorder is not None:
            self.recorder.close()
        signals = [name for name in self.runtime.gather(stop.signal) if name is not None]
        raise Interrupted(signals[0], f"saved after update {updates} of {self.plan.steps} in "
                          f"{self.folder.checkpoints}")  # fmt: skip

    def _recorded(
        self, step: Callable[[Batch, Moment], StepResult], batch: Batch, moment: Moment
    ) -> StepResult:
        """`step`, told to the flight recorder."""
        self.flight.begin(
            batch, updates=moment.updates, first_row=moment.rows.start,
            position=self._progress.position(moment.updates),
        )  # fmt: skip
        result = step(batch, moment)
        self.flight.loss(result.loss)
        return result

    def record(self, updates: int, values: Mapping[str, float]) -> None:
        """Held-out numbers: into the metrics and, the last ones, into the summary."""
        self.summary |= values
        self._write_line("heldout", updates, values)

    def _write_line(self, kind: str, updates: int, values: Mapping[str, float]) -> None:
        if self.recorder is not None:
            self.recorder.write(updates, values, kind=kind)

    def _save(self, updates: int) -> None:
        pending = {"sums": self._meter.pending(), "bad": self.bad_samples.unshared}
        self.snapshots.save(
            updates, pending=pending, bad_samples=self.bad_samples.total,
            nonfinite=self.nonfinite.total, average=self.average,
        )  # fmt: skip

    def _go_back(self, done: int) -> int:
        return self.snapshots.go_back(done, average=self.average)

    def _warn(self, text: str) -> None:
        if self.recorder is not None:
            self.recorder.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

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


def peak_memory() -> int:
    """MiB, of this process so far: of the GPU where there is one, else resident memory without that
    of loader processes."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved() >> 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
