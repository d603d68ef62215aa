"""What every training has in common: ranks, run folder, sample stream, checkpoints, the loop."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mimkit import build, runs
from mimkit.batch import Batch
from mimkit.config import Config, DataConfig, TokenizerConfig
from mimkit.data.loader import BatchLoader, OnBadSample, TokenRows, eval_loader, train_loader
from mimkit.data.overlap import shared_images
from mimkit.data.sources import Source
from mimkit.files import write_text
from mimkit.masks import Mask
from mimkit.runs import RunFolder
from mimkit.train import checkpoint
from mimkit.train.bad_samples import BadSamples
from mimkit.train.loop import Hook, Moment, Plan, divide_batch, train
from mimkit.train.metrics import Recorder
from mimkit.train.runtimes import RUNTIMES, Runtime, UpdateRule
from mimkit.train.step import StepResult

_MOST_WARNINGS = 10  # of a rank, about bad samples; all are counted


@dataclass(frozen=True)
class Data:
    train: Source
    heldout: Source | None


class Session:
    """One training on one rank, from the start of the engine to the last checkpoint.

    Args:
        config: of a pretraining or a tokenizer's training.
        views: sizes and interpolations of the views; those of `config` where both are used.
        bf16: whether forward runs under bf16 autocast.
        started_at: when the command was given, seconds since the epoch.

    Raises:
        UserError: the batch does not divide, the DeepSpeed JSON contradicts, the data cannot be
            read, the folder is another run's or in use.
    """

    def __init__(
        self,
        config: Config | TokenizerConfig,
        *,
        views: DataConfig,
        bf16: bool,
        started_at: float,
    ) -> None:
        self.config, self.views, self.started_at = config, views, started_at
        build.check_splits(config.data)
        self.runtime: Runtime = RUNTIMES[config.engine.runtime]()
        torch.set_num_threads(config.engine.threads or max(1, _cores() // self.runtime.local_world))
        self.rule = self._update_rule(bf16)
        self.runtime.check(self.rule)
        self.data = self._open_data()
        self.folder: RunFolder = self.runtime.from_rank_0(
            runs.choose_run_folder(config) if self.runtime.rank == 0 else None
        )
        self._lock: runs.Lock | None = None
        if self.is_first and not self.folder.finished:
            self._lock = runs.lock(self.folder)
        self.runtime.from_rank_0(None)  # nobody goes on where the folder is in use
        self.plan = Plan(
            steps=build.num_steps(config.train, self.data.train.epoch_length),
            batch_size=config.train.batch_size,
            micro_batch=self.rule.micro_batch,
            accumulation=self.rule.accumulation,
            log_every=config.output.log_every,
        )
        self.start = 0
        self.bad_samples = BadSamples(
            before=0, allowed=config.data.max_bad_samples, speaks=self.is_first
        )
        self.recorder: Recorder | None = None
        self.summary: dict[str, Any] = {}

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and speaks."""
        return self.runtime.rank == 0

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
        """Rank 0 first: it writes indexes and the embedded shards where there are none yet."""
        if not self.is_first:
            self.runtime.from_rank_0(None)
        opened = Data(*build.build_data(self.config.data))
        if self.is_first:
            self.runtime.from_rank_0(None)
        return opened

    @property
    def workers(self) -> int:
        """Loader processes of this rank."""
        if self.config.engine.workers is not None:
            return self.config.engine.workers
        if self.runtime.device.type == "cpu":
            return 1  # the cores train; one process keeps the next batch ready
        return min(16, max(1, _cores() // self.runtime.local_world))

    def prepare(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        """Hands both to the engine; where the run was interrupted, as they were then."""
        before = checkpoint.load(self.folder.continues) if self.folder.continues else None
        if before is not None:
            model.load_state_dict(dict(before.weights))
            self.start = before.updates
            self.bad_samples.total = before.bad_samples
        self.runtime.prepare(model, optimizer, self.rule)
        if before is not None:
            self.runtime.restore(before.moments, updates=before.updates)
        self.runtime.model.train()
        self.optimizer = optimizer

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
            f"run folder: {self.folder.path}",
        ]
        if self.start:
            sample = self.start * self.plan.batch_size
            lines.append(f"continuing from {self.folder.continues}: update {self.start} of "
                         f"{self.plan.steps}, sample {sample}")  # fmt: skip
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

    def batches(self, mask: Mask | None, *, tokens: TokenRows | None = None) -> Iterator[Batch]:
        """The endless stream of this rank's micro-batches, from where the run stands.

        Args:
            tokens: of a bank; then no token view is rendered.
        """
        loader = train_loader(
            source=self.data.train,
            views=build.build_views(self.views, "both" if tokens is None else "patches"),
            tokens=tokens,
            mask=mask,
            seed=self.config.seed,
            batch_size=self.rule.micro_batch,
            rank=self.runtime.rank,
            world=self.runtime.world,
            position=self.start * self.plan.batch_size,
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
    ) -> Iterator[Batch]:
        """Centre views and masks of the first `limit` images, the same at every call.

        Args:
            alone: every rank gets all of them instead of its share.
            tokens: of a bank; then no token view is rendered.
        """
        loader = eval_loader(
            source=source,
            view=build.build_probe_view(self.views, "both" if tokens is None else "patches"),
            tokens=tokens,
            mask=mask,
            seed=self.config.seed,
            batch_size=min(self.rule.micro_batch, limit),
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
        """Every update that is left, with checkpoints; returns the whole weights."""
        output = self.config.output
        substitutes = self.config.data.on_bad_sample == "substitute"
        rate = train(
            runtime=self.runtime,
            optimizer=self.optimizer,
            step=step,
            batches=batches,
            plan=self.plan,
            learning_rate=build.build_schedule(self.config.train, self.plan.steps),
            start=self.start,
            hooks=[*hooks, Hook(output.checkpoint_every, self._save)],
            recorder=self.recorder,
            after_update=after_update,
            bad_samples=self.bad_samples if substitutes else None,
        )
        if self.start == self.plan.steps:  # stopped between the last checkpoint and the summary
            for hook in hooks:
                hook.action(self.start)
        self.summary["substituted_samples"] = self.bad_samples.total
        self.summary |= {"steps": self.plan.steps, "images_per_second": round(rate, 2) or None}
        if self.recorder is not None:
            self.recorder.close()
        return self.runtime.weights()

    def record(self, updates: int, values: Mapping[str, float]) -> None:
        """Held-out numbers: into the metrics and, the last ones, into the summary."""
        self.summary |= values
        if self.recorder is not None:
            self.recorder.write(updates, values, kind="heldout")

    def _save(self, updates: int) -> None:
        state = checkpoint.Checkpoint(
            updates, updates * self.plan.batch_size, self.runtime.weights(),
            self.runtime.moments(), self.bad_samples.total,
        )  # fmt: skip
        if self.is_first:
            checkpoint.save(
                self.folder.checkpoints, state, keep=self.config.output.keep_checkpoints
            )

    def close(self) -> None:
        """Ends the engine; afterwards ranks work on their own."""
        self.runtime.close()

    def finish(self) -> None:
        """Rank 0: the summary, which makes the run a finished one."""
        write_text(self.folder.path / "summary.json", json.dumps(self.summary, indent=2))
        assert self._lock is not None
        self._lock.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0))
