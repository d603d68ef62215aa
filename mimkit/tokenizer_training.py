"""Training of a dVAE, from a configuration to a file that pretraining can use."""

import copy
from typing import Any

import torch
from torch import Tensor

from mimkit.batch import Batch, to_unit
from mimkit.config import DvaeConfig
from mimkit.errors import UserError
from mimkit.files import write_text
from mimkit.random import Purpose, torch_generator
from mimkit.runs import RunFolder
from mimkit.session import Session
from mimkit.tokenizer_report import (
    refuse_other_sizes,
    refuse_what_does_nothing,
    save_picture,
    use_in_rows,
    use_in_words,
    warn_of_collapse,
    what_next,
    where_it_is_from,
    words_in_use,
)
from mimkit.tokenizers import TOKENIZERS
from mimkit.tokenizers._dvae_file import save_dvae
from mimkit.tokenizers._dvae_health import (
    PUBLISHED_MAE,
    psnr,
    reconstruction_sums,
    token_counts,
    token_health,
)
from mimkit.tokenizers._dvae_model import DOWNSAMPLING, Dvae, make_dvae, reconstruct
from mimkit.tokenizers._dvae_training import (
    DvaeTrainee,
    revive_words,
    spread_words,
    update_average,
)
from mimkit.train.loop import Hook, Moment
from mimkit.train.metrics import Meter
from mimkit.train.optimizer import make_optimizer
from mimkit.train.schedule import cosine
from mimkit.train.step import StepResult

_REMEDY = "with a lower kl_weight, a lower lr, objective.revive=0.1 or longer"


class _Trainee(DvaeTrainee):  # type: ignore[misc]  # mypy can not follow mimkit.tokenizers
    """The dVAE and the running average of its weights, which travels in the same checkpoints."""

    def __init__(self, dvae: Dvae) -> None:
        super().__init__(dvae)
        self.average = copy.deepcopy(dvae).requires_grad_(False)


def run(config: DvaeConfig, *, started_at: float) -> RunFolder:
    """Trains, measures and writes `tokenizer.safetensors` with its card into the run folder."""
    _check(config)
    noise = torch_generator(Purpose.INIT, seed=config.seed)
    dvae = make_dvae(**config.model.model_dump(), generator=noise)
    # the encoder's view is not used: render it at the tokenizer's size
    views = config.data.model_copy(update={"image_size": config.data.token_size})
    session = Session(config, views=views, bf16=False, started_at=started_at)
    if not session.folder.finished:
        with session.tidy():
            _TokenizerTraining(config, _Trainee(dvae), session).run()
    return session.folder


def _check(config: DvaeConfig) -> None:
    if config.engine.precision == "bf16":
        raise UserError("a dVAE trains in fp32 (dall_e's convolutions); set engine.precision=fp32")
    refuse_what_does_nothing(
        config,
        what="a dVAE",
        zero_3="the average of the weights needs them whole on every rank",
    )
    if config.objective.revive and config.engine.zero_stage:
        raise UserError(
            f"objective.revive={config.objective.revive} changes weights between updates, of which "
            f"ZeRO stage {config.engine.zero_stage} keeps copies; set engine.zero_stage=0, or "
            "objective.revive=0"
        )
    if config.train.ema is not None:
        raise UserError("a dVAE has an average of its own: set objective.ema, and train.ema=null")
    refuse_other_sizes(config, patch=DOWNSAMPLING, whose="")


class _TokenizerTraining:
    """What this training adds to a session: the objective, health, pictures, the file."""

    def __init__(self, config: DvaeConfig, trainee: _Trainee, session: Session) -> None:
        self.config, self.trainee, self.session = config, trainee, session

    def run(self) -> None:
        config, session = self.config, self.session
        optimizer = make_optimizer(
            self.trainee, decays=lambda name, _: name.endswith(".w"), eps=config.train.eps,
            weight_decay=config.train.weight_decay, betas=config.train.betas,
        )  # fmt: skip
        parameters = sum(p.numel() for p in self.trainee.dvae.parameters())
        if config.objective.spread is not None and session.folder.continues is None:
            self._spread(config.objective.spread)
        session.prepare(self.trainee, optimizer)
        session.announce(
            what=f"dVAE of width {config.model.width}, {config.model.vocabulary} words, "
            f"{parameters / 1e6:.2f} M parameters, views of {config.data.token_size} pixels",
            facts={},
        )
        session.train(
            self._step,
            session.data.batches(None, position=session.position),
            hooks=[
                Hook(config.output.evaluate_every, self._evaluate),
                Hook(config.output.picture_every, self._draw),
            ],
            after_update=self._after_update,
        )
        session.close()
        if session.is_first:
            self._finish()

    def _spread(self, deviation: float) -> None:
        """Every rank looks at the same views, so that all start from the same weights."""
        batches = self.session.data.fixed_batches(
            self.session.data.train, None, limit=256, alone=True
        )
        view_BChw = to_unit(torch.cat([batch.token_view_BChw for batch in batches]))
        spread_words(self.trainee.dvae, view_BChw, deviation=deviation)
        self.trainee.average.load_state_dict(self.trainee.dvae.state_dict())

    def _step(self, batch: Batch, moment: Moment) -> StepResult:
        """The negative ELBO; noise is keyed by the update and the place in the global batch."""
        runtime, objective = self.session.runtime, self.config.objective
        fraction = moment.updates / self.session.plan.steps
        noise = torch_generator(Purpose.GUMBEL, seed=self.config.seed, epoch=moment.rows.start,
                                sample=moment.updates, device=runtime.device)  # fmt: skip
        view_BChw = to_unit(batch.token_view_BChw)
        loss, parts = runtime.model(
            # on a CPU 28 to 36 ms an image instead of 34 to 40 (width 32, one thread)
            view_BChw.contiguous(memory_format=torch.channels_last),
            generator=noise,
            temperature=cosine(fraction / objective.temperature_share, *objective.temperature),
            kl_weight=cosine(fraction / objective.kl_share, 0.0, objective.kl_weight),
            balance_weight=cosine(fraction / objective.balance_share, *objective.balance),
        )
        images = len(batch.token_view_BChw)
        parts = {"loss": loss.detach(), **parts}
        return StepResult(loss, {name: (v * images, images) for name, v in parts.items()})

    def _after_update(self, updates: int) -> None:
        objective, average = self.config.objective, self.trainee.average
        update_average(average, self.trainee.dvae, decay=objective.ema, step=updates)
        revive_words(
            self.trainee,
            self.session.runtime.sum(self.trainee.taken_counts()),
            average=average,
            revive=objective.revive,
            generator=torch_generator(
                Purpose.CODEBOOK, seed=self.config.seed, epoch=1, sample=updates
            ),
        )

    @torch.no_grad()
    def _evaluate(self, updates: int) -> None:
        """Reconstruction through argmax tokens of the averaged weights, and how they are used."""
        runtime, meter = self.session.runtime, Meter()
        counts_V = torch.zeros(self.config.model.vocabulary, device=runtime.device)
        limit = self.config.data.heldout_limit
        for padded in self.session.data.fixed_batches(self.session.data.judged, None, limit=limit):
            batch = padded.to(runtime.device)
            view_BChw = to_unit(batch.token_view_BChw)[batch.index_B >= 0]
            if len(view_BChw):
                again_BChw, target_BN = self._again(view_BChw)
                counts_V += token_counts(target_BN, vocabulary=len(counts_V))
            else:  # every rank adds the same names
                again_BChw = view_BChw
            meter.add(reconstruction_sums(view_BChw, again_BChw))
        means = meter.means(runtime.sum)
        health = token_health(runtime.sum(counts_V).long().cpu())
        pixels = {
            "heldout_mae": means["mae"],
            "heldout_psnr": psnr(means["mse"]),
            "heldout_ssim": means["ssim"],
        }
        self.session.record(updates, pixels | words_in_use(health))
        warn_of_collapse(self.session, updates, health, remedy=_REMEDY)

    def _again(self, view_BChw: Tensor) -> tuple[Tensor, Tensor]:
        """The views redrawn from their tokens, and the tokens."""
        average = self.trainee.average
        target_Byx = average.logits(view_BChw).argmax(dim=1)
        word_BVyx = torch.nn.functional.one_hot(target_Byx, self.config.model.vocabulary)
        mean_B3hw, _ = average.pixel_parameters(word_BVyx.permute(0, 3, 1, 2).float())
        return reconstruct(mean_B3hw), target_Byx.flatten(1)

    @torch.no_grad()
    def _draw(self, updates: int) -> None:
        if not self.session.is_first:
            return
        batch = next(
            self.session.data.fixed_batches(self.session.data.judged, None, limit=12, alone=True)
        )
        view_BChw = to_unit(batch.token_view_BChw.to(self.session.runtime.device))
        again_BChw, _ = self._again(view_BChw)
        save_picture(self.session, updates, {"token view": view_BChw, "redrawn": again_BChw})

    def _finish(self) -> None:
        session, path = self.session, self.session.folder.path
        how = {"config": self.config.model_dump(mode="json"), "measured": session.summary}
        save_dvae(path / "tokenizer.safetensors", self.trainee.average, settings=how, half=True)
        made = TOKENIZERS["dvae"](path=str(path / "tokenizer.safetensors"))
        write_text(path / "tokenizer.md", _card(self.config, session.summary, made.fingerprint))
        session.finish()
        s = session.summary
        print(
            f"\nDone: {s['steps']} steps.\n"
            f"Held-out pixels: mean absolute error {s['heldout_mae']:.4f} of the range 0..1 "
            f"({PUBLISHED_MAE}), PSNR {s['heldout_psnr']:.1f} dB, SSIM {s['heldout_ssim']:.3f}.\n"
            f"{use_in_words(s, vocabulary=self.config.model.vocabulary, noun='words')}\n"
            f"Everything is in {path}: tokenizer.safetensors, tokenizer.md, pictures/.\n"
            + what_next(self.config, s, path, name="dvae", patch=DOWNSAMPLING, remedy=_REMEDY),
            flush=True,
        )


def _card(config: DvaeConfig, summary: dict[str, Any], fingerprint: str) -> str:
    """What a person who finds the weights wants to know."""
    m = config.model
    return f"""# A dVAE tokenizer

DALL-E's architecture (`dall_e`) at width {m.width}, {m.blocks} block(s) a group, \
{m.vocabulary} words of 8 x 8 pixels;
encoder and decoder in fp16, trained by `tools/train_tokenizer.py` for {summary["steps"]} steps of
{config.train.batch_size} views of {config.data.token_size} pixels from `{config.data.train}`, \
seed {config.seed}.

| measured on held-out images, averaged weights | |
|---|---|
| mean absolute pixel error (range 0..1) | {summary["heldout_mae"]:.4f} ({PUBLISHED_MAE}) |
| PSNR | {summary["heldout_psnr"]:.2f} dB |
| SSIM | {summary["heldout_ssim"]:.4f} |
{use_in_rows(summary, vocabulary=m.vocabulary, noun="word")}

{where_it_is_from(fingerprint)}

Use: `tokenizer.name=dvae tokenizer.path=tokenizer.safetensors`, views of a size that is a \
multiple of 8.
"""
