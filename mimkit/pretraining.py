"""One pretraining run, from a configuration to a summary."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mimkit import build
from mimkit.audit.leak import leaks_of_run
from mimkit.audit.of_run import RunAudits, audit_tokenizer
from mimkit.banks import Banks, open_banks
from mimkit.batch import Batch, Grid, normalise
from mimkit.config import Config
from mimkit.files import atomic_file
from mimkit.kernels import check_kernels, choose_kernels
from mimkit.masks import Mask
from mimkit.models.blocks import drop_path_of_update, drop_path_rates
from mimkit.models.calibration import calibrate, has_frozen_statistics
from mimkit.models.encoder import Encoder
from mimkit.models.mim import MaskedImageModel
from mimkit.models.roles import decays
from mimkit.probing import CALIBRATION_IMAGES, Ranks, check_online, online_probe, probe
from mimkit.runs import RunFolder
from mimkit.session import Session
from mimkit.tokenizers import VisualTokenizer
from mimkit.train.heldout import evaluate, mean_losses
from mimkit.train.loop import Hook, Moment
from mimkit.train.optimizer import make_optimizer
from mimkit.train.pictures import prediction_picture
from mimkit.train.step import StepResult, mim_step, predict
from mimkit.train.watched_tokenizer import WatchedTokenizer


@dataclass
class Parts:
    """What the configuration stands for, apart from data and engine: made in seconds."""

    model: MaskedImageModel
    tokenizer: VisualTokenizer
    mask: Mask
    grid: Grid
    hidden: float  # share of the patches that the encoder gets the mask token for


def make_parts(config: Config) -> Parts:
    """Every part, checked against the others; UserError names the setting to change."""
    tokenizer = build.build_tokenizer(config)
    model = build.build_model(config, prediction_dim=tokenizer.prediction_dim)
    grid = build.check_grids(config, model, tokenizer)
    mask = build.build_mask(config, grid)
    hidden = build.hidden_share(mask, model.mask_at, model.stem)
    return Parts(model, tokenizer, mask, grid, hidden)


def run(config: Config, *, started_at: float) -> RunFolder:
    """Trains, evaluates and probes; returns the run folder (`finished` if it was already).

    Args:
        started_at: when the command was given (seconds since the epoch), for the summary.
    """
    check_kernels(config.engine)
    parts = make_parts(config)
    session = Session(
        config,
        views=config.data,
        bf16=build.use_bf16(config.engine),
        started_at=started_at,
    )
    if not session.folder.finished:
        with session.tidy():
            with session.told_once():
                check_online(config, session.data.train, session.data.heldout)
                training = Pretraining(config, parts, session)
            training.run()
    return session.folder


class Pretraining:
    """What this training adds to a session: the step, held-out loss, pictures, probe."""

    def __init__(self, config: Config, parts: Parts, session: Session) -> None:
        self.config, self.parts, self.session = config, parts, session
        self.pixels: dict[str, Any] = {"mean": config.data.mean, "std": config.data.std}
        self.rates_L = drop_path_rates(len(parts.model.encoder.blocks), config.encoder.drop_path)
        self.kernels: dict[str, str] = {}  # see choose_kernels
        self.probe_seconds = 0.0  # since this process began
        self.watched = WatchedTokenizer(parts.tokenizer)
        self.banks: Banks | None = None  # with one, the tokenizer stays off the device, unused
        if config.engine.token_bank is not None:
            self.banks = open_banks(config, parts.tokenizer, session.data.train,
                                    session.data.heldout, steps=session.plan.steps)  # fmt: skip
        else:
            parts.tokenizer.to(session.runtime.device)

    def run(self) -> None:
        config, model, session = self.config, self.parts.model, self.session
        parameters = sum(p.numel() for p in model.parameters())
        audits = self._audits()
        self.prepare()
        session.announce(
            what=f"{config.stem.name} stem, ViT-{config.encoder.size}, "
            f"{_blocks(model.encoder)}, {parameters / 1e6:.2f} M parameters, "
            f"{self._masking()}",
            facts={"tokenizer": self.parts.tokenizer.fingerprint, **self.kernels},
        )
        session.summary |= audits.numbers()
        session.summary |= {"patches": math.prod(self.parts.grid),
                            "masked_patches": self.parts.mask.num_masked}  # fmt: skip
        if session.is_first:
            print(audits.say(), flush=True)
            audits.save(session.folder.path / "audits")
        trained = session.train(self.step, self.batches(), hooks=self._hooks())
        self._judge_means()
        self._note_tokenizer_share()
        weights = session.averaged_weights() or trained
        session.close()
        if session.is_first:
            self._finish(weights)

    def prepare(self) -> None:
        """Hands model and optimizer to the engine, as they were where the run goes on."""
        train, model, session = self.config.train, self.parts.model, self.session
        if has_frozen_statistics(model.stem) and session.folder.continues is None:
            calibrate(model.stem, self._calibration_images())
        self.kernels = choose_kernels(model, model.encoder, engine=self.config.engine,
                                      session=session)  # fmt: skip
        optimizer = make_optimizer(model, decays=decays, weight_decay=train.weight_decay,
                                   betas=train.betas, eps=train.eps)  # fmt: skip
        session.prepare(model, optimizer, ema=train.ema)

    def batches(self, *, position: int | None = None) -> Iterator[Batch]:
        """This rank's micro-batches, from where the run stands, or from another sample on."""
        tokens = None if self.banks is None else self.banks.train.row
        return self.session.data.batches(
            self.parts.mask, tokens=tokens,
            position=self.session.position if position is None else position,
        )  # fmt: skip

    def _masking(self) -> str:
        total = self.parts.grid[0] * self.parts.grid[1]
        masked, hidden = self.parts.mask.num_masked, self.parts.hidden * total
        more = f", {hidden:.1f} hidden on average" if hidden > masked + 0.05 else ""
        most = "" if self.parts.mask.exact else "at most "
        return f"{most}{masked} of {total} patches masked ({self.config.mask_at.name}){more}"

    def _calibration_images(self) -> Iterator[Tensor]:
        """The first training images as they are; every rank measures the same."""
        train = self.session.data.train
        batches = self.session.data.fixed_batches(train, None, limit=CALIBRATION_IMAGES, alone=True)
        for batch in batches:
            yield normalise(batch.patch_view_BCHW[batch.index_B >= 0], **self.pixels)

    def _audits(self) -> RunAudits:
        """UserError where the targets are as good as constant; rank 0 looks at them for all."""
        config, parts, session = self.config, self.parts, self.session
        leaks = leaks_of_run(parts.model.stem, parts.model.mask_at, parts.mask,
                             name=config.stem.name, placement=config.mask_at.name)  # fmt: skip
        tokenizer = None
        with session.told_once():
            if session.is_first and self.banks is None:  # else: when they were made
                tokenizer = audit_tokenizer(parts.tokenizer, session.data.train, config.data,
                                            name=config.tokenizer.name, seed=config.seed,
                                            device=session.runtime.device)  # fmt: skip
        return RunAudits(leaks, tokenizer)

    def _note_tokenizer_share(self) -> None:
        summary, world = self.session.summary, self.session.runtime.world
        rate = summary["images_per_second"]
        if (share := self.watched.share(images_per_second=rate, world=world)) is not None:
            summary["tokenizer_share"] = round(share, 4)

    def step(self, batch: Batch, moment: Moment) -> StepResult:
        """The loss of a micro-batch, to go backward from."""
        model = self.session.runtime.model
        return mim_step(model, self.watched, batch, **self._forward(moment))

    def predict(self, batch: Batch, moment: Moment) -> tuple[Tensor, Tensor]:
        """predicted_MV and target_M of a micro-batch, as `step` has them."""
        model, tokenizer = self.session.runtime.model, self.parts.tokenizer
        return predict(model, tokenizer, batch, **self._forward(moment))

    def _forward(self, moment: Moment) -> dict[str, Any]:
        mask = self.parts.mask
        known = mask.num_masked if mask.exact else None
        return {**self.pixels, "keep_LB2R": self._drop_path(moment), "num_masked": known}

    def _drop_path(self, moment: Moment) -> Tensor | None:
        return drop_path_of_update(
            self.rates_L, seed=self.config.seed, update=moment.updates, rows=moment.rows,
            batch=self.session.plan.batch_size, branches=self.config.encoder.branches,
            device=self.session.runtime.device,
        )  # fmt: skip

    def _hooks(self) -> list[Hook]:
        output = self.config.output
        hooks = []
        if self.parts.tokenizer.can_decode:
            hooks.append(Hook(output.picture_every, self._draw))
        if self.session.data.heldout is not None:
            hooks.append(Hook(output.evaluate_every, self._evaluate))
        if self.config.probe.every is not None:
            hooks.append(Hook(self.config.probe.every, self._probe))
        return hooks

    def _probe(self, updates: int) -> None:
        """kNN of a copy of the weights; what it costs is written beside it."""
        started, session = time.perf_counter(), self.session
        weights = session.averaged_weights() or session.runtime.weights()
        assert session.data.heldout is not None
        runtime = session.runtime
        ranks = Ranks(
            runtime.device, session.data.workers, runtime.rank, runtime.world, runtime.sum
        )
        found = online_probe(
            self.config, weights, session.data.train, session.data.heldout, ranks=ranks
        )
        seconds = time.perf_counter() - started
        self.probe_seconds += seconds
        session.record(updates, {**found, "online_probe_seconds": round(seconds, 3)})
        session.summary["online_probe_seconds_total"] = round(self.probe_seconds, 3)

    def _evaluate(self, updates: int) -> None:
        """Of the averaged weights, where there are some; so are the pictures and the probe."""
        heldout = None if self.banks is None else self.banks.heldout
        with self.session.judged_weights():
            values = evaluate(
                self.session.runtime.model,
                self.parts.tokenizer,
                self.session.data.fixed_batches(
                    self.session.data.judged,
                    self.parts.mask,
                    limit=self.config.data.heldout_limit,
                    tokens=None if heldout is None else heldout.row,
                ),
                device=self.session.runtime.device,
                sum_over_ranks=self.session.runtime.sum,
                **self.pixels,
            )
        self.session.record(updates, values)

    def _judge_means(self) -> None:
        """Beside the held-out loss of targets that are numbers; of words every evaluation does."""
        session, data = self.session, self.config.data
        heldout, mask = session.data.heldout, self.parts.mask
        if heldout is None or self.parts.tokenizer.vocabulary is not None:
            return
        view = build.build_probe_view(data, "tokens")
        with session.stopwatch.lap("mean_losses"):
            session.summary |= mean_losses(
                self.parts.tokenizer,
                lambda: session.data.fixed_batches(
                    heldout, mask, limit=data.heldout_limit, view=view
                ),
                device=session.runtime.device,
                sum_over_ranks=session.runtime.sum,
            )

    @torch.no_grad()
    def _draw(self, updates: int) -> None:
        """Every rank goes forward (ZeRO-3 gathers weights for it); rank 0 keeps the picture."""
        runtime, tokenizer = self.session.runtime, self.parts.tokenizer
        fixed = self.session.data.fixed_batches(
            self.session.data.judged, self.parts.mask, limit=8, alone=True
        )
        batch = next(fixed).to(runtime.device)
        runtime.model.eval()
        image_BCHW = normalise(batch.patch_view_BCHW, **self.pixels)
        with self.session.judged_weights():
            predicted_MV = runtime.model(image_BCHW, batch.mask_BN, None).float()
        runtime.model.train()
        if self.session.is_first:
            where = torch.device("cpu") if self.banks is not None else runtime.device
            picture = prediction_picture(
                predicted_MV.to(where), tokenizer, batch.to(where), grid=self.parts.grid
            )
            path = self.session.folder.path / "pictures" / f"step-{updates:08d}.png"
            with atomic_file(path) as temporary:
                picture.save(temporary, "PNG")

    def _finish(self, weights: dict[str, Tensor]) -> None:
        """kNN beside its baselines, then the summary; rank 0 alone, engine closed."""
        session = self.session
        with session.stopwatch.lap("final_probe"):
            session.summary |= probe(
                self.config, weights, session.data.train, session.data.heldout,
                device=session.runtime.device, workers=session.data.workers,
            )  # fmt: skip
        session.finish()
        print(_report(session.summary, session.folder), flush=True)


def _blocks(encoder: Encoder) -> str:
    of = f" of {encoder.branches} branches" if encoder.branches > 1 else ""
    return f"{encoder.depth} block{'s' if encoder.depth > 1 else ''}{of}"


def _report(s: dict[str, Any], folder: RunFolder) -> str:
    """What was learnt, for somebody who has never seen such a run."""
    speed = f" at {s['images_per_second']:.0f} images/s" if s["images_per_second"] else ""
    first = f", the first after {s['seconds_to_first_step']:.0f} s" if speed else ""
    lines = ["", f"Done: {s['steps']} steps{speed}{first}."]
    if share := s.get("tokenizer_share"):
        bank = ("; runs that share a token bank take none (mimkit make_tokens --estimate)"
                if "tokenizer_used" in s else "")  # fmt: skip  # a bank holds words
        lines.append(f"The tokenizer took {share:.0%} of the time of a step{bank}.")
    if "unigram_entropy" in s:
        gained = min(s["unigram_entropy"], s["position_loss"]) - s["heldout_loss"]
        lines += [
            f"Held-out loss of masked tokens: {s['heldout_loss']:.3f} nats. Guessing by frequency "
            f"costs {s['unigram_entropy']:.3f}, by position {s['position_loss']:.3f}, blindly "
            f"{s['ln_vocab']:.3f} (ln V):",
            f"  the model gained {gained:.3f} nats over the best of them." if gained > 0 else
            "  the model has not yet learnt more than frequencies and positions; train longer.",
            f"  {s['heldout_accuracy']:.1%} of the masked tokens are right; always naming the most "
            f"common one would be {s['most_common_token']:.1%}.",
        ]  # fmt: skip
    elif "mean_target_loss" in s:
        least = min(s["mean_target_loss"], s["mean_by_position_loss"])
        lines += [
            f"Held-out loss: {s['heldout_loss']:.4f}. Always predicting the mean target costs "
            f"{s['mean_target_loss']:.4f}, the mean at each position "
            f"{s['mean_by_position_loss']:.4f}:",
            f"  the model gained {least - s['heldout_loss']:.4f} over the better of them."
            if s["heldout_loss"] < least else
            "  the model has not yet learnt more than means; train longer.",
        ]  # fmt: skip
    elif "heldout_loss" in s:
        lines.append(f"Held-out loss: {s['heldout_loss']:.4f}.")
    if "knn_top1" in s:
        lines.append(
            f"kNN on frozen features of {s['knn_heldout_images']} held-out images: "
            f"{s['knn_top1']:.1%} right; untrained encoder {s['knn_top1_untrained']:.1%}, raw "
            f"pixels {s['knn_top1_pixels']:.1%}, most common label {s['knn_chance']:.1%}."
        )
    else:
        lines.append(f"No kNN: {s['knn_skipped']}.")
    if found := s.get("heldout_images_trained_on"):
        lines.append(f"WARNING: about {found} of the held-out images were trained on; they are in "
                     "the numbers above, and tell nothing about images that were not.")  # fmt: skip
    if s["leak_train_visible_moved"]:
        smaller = "" if s["leak_eval_visible_moved"] else "; a larger batch moves less"
        lines.append(
            f"Leak: in training pixels under the mask move {s['leak_train_visible_moved']:.1%} "
            f"of the visible tokens, by {s['leak_train_mean_relative']:.1%} on average (on four "
            f"images of noise{smaller}). More: mimkit audit leak."
        )
    lines += [
        f"Everything is in {folder.path}: summary.json, metrics.jsonl, pictures/, checkpoints/.",
        f"Next: mimkit export {folder.path} encoder.safetensors --format timm",
    ]
    return "\n".join(lines)
