"""Training of a VQ-KD, from a configuration to a file that pretraining can use."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mimkit import build
from mimkit.batch import Batch, to_unit
from mimkit.config import VqkdConfig
from mimkit.errors import UserError
from mimkit.files import write_text
from mimkit.models.sizes import SIZES
from mimkit.random import Purpose, generator, torch_generator
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
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer
from mimkit.tokenizers._dvae_health import token_health
from mimkit.tokenizers._network_file import drawn_from
from mimkit.tokenizers._vqkd_file import VqkdSettings, save_vqkd
from mimkit.tokenizers._vqkd_model import Vqkd, VqkdDecoder
from mimkit.tokenizers._vqkd_training import Statistics, VqkdTrainee, cluster, update_codebook
from mimkit.tokenizers.vqkd import draw_codes
from mimkit.train.loop import Hook, Moment
from mimkit.train.metrics import Meter
from mimkit.train.optimizer import make_optimizer
from mimkit.train.step import StepResult

_REMEDY = "with a higher objective.revive, a lower train.lr or longer"
_CLUSTERED = 256  # views whose tokens the first codebook is made of


def run(config: VqkdConfig, *, started_at: float) -> RunFolder:
    """Trains, measures and writes `tokenizer.safetensors` with its card into the run folder."""
    _check(config)
    teacher = _build_teacher(config)
    trainee = _build_trainee(config, teacher)
    # the encoder's view is not used: render it at the tokenizer's size
    views = config.data.model_copy(update={"image_size": config.data.token_size})
    bf16 = build.use_bf16(config.engine)
    session = Session(config, views=views, bf16=bf16, started_at=started_at)
    if not session.folder.finished:
        with session.tidy():
            _VqkdTraining(config, teacher, trainee, session).run()
    return session.folder


def _check(config: VqkdConfig) -> None:
    refuse_what_does_nothing(
        config,
        what="a VQ-KD",
        zero_3="the codebook is made of the whole encoder's tokens on every rank",
    )
    if config.train.ema is not None:
        raise UserError(
            "train.ema does nothing for a VQ-KD, whose codes move with the weights; set it to null"
        )
    refuse_other_sizes(config, patch=config.model.patch_size, whose="model.patch_size=")


def _build_teacher(config: VqkdConfig) -> VisualTokenizer:
    """UserError where it gives words, or another grid than the model."""
    try:
        teacher = build.make_part(TOKENIZERS, config.teacher)
        size, side = config.data.token_size, config.data.token_size // config.model.patch_size
        grid = teacher.grid(size, size)
    except UserError as error:  # there is one section more of that kind here
        raise UserError(str(error).replace("tokenizer.", "teacher.")) from error
    if teacher.vocabulary is not None:
        raise UserError(
            f"teacher.name={config.teacher.name} gives words; a VQ-KD makes words of numbers, for "
            "example of teacher.name=features"
        )
    if grid != (side, side):
        raise UserError(
            f"model.patch_size={config.model.patch_size} makes a {side}x{side} grid of views of "
            f"{size} pixels, but the teacher '{config.teacher.name}' {grid[0]}x{grid[1]}; set "
            f"model.patch_size={size // grid[0]}, or choose another teacher"
        )
    return teacher


def _build_trainee(config: VqkdConfig, teacher: VisualTokenizer) -> VqkdTrainee:
    """Initial weights are a pure function of the configuration."""
    model, size = config.model, SIZES[config.model.size]
    seed = int(generator(Purpose.INIT, seed=config.seed).integers(2**63 - 1))
    with drawn_from(seed):
        vqkd = Vqkd(**_settings(config).sizes)
        decoder = VqkdDecoder(
            width=size.width,
            heads=size.heads,
            depth=model.decoder_depth,
            grid=config.data.token_size // model.patch_size,
            code_dim=model.code_dim,
            features=teacher.prediction_dim,
        )
    return VqkdTrainee(vqkd, decoder, teacher.loss).train()


def _settings(config: VqkdConfig, training: Mapping[str, Any] | None = None) -> VqkdSettings:
    model, size = config.model, SIZES[config.model.size]
    return VqkdSettings(
        width=size.width,
        heads=size.heads,
        depth=model.depth or size.depth,
        patch_size=model.patch_size,
        image_size=config.data.token_size,
        vocabulary=model.vocabulary,
        code_dim=model.code_dim,
        training=dict(training or {}),
    )


def _decays(name: str, parameter: nn.Parameter) -> bool:
    """BEiT v2's: all but biases, norms, the class token and positions."""
    return parameter.ndim > 1 and not name.endswith(("cls_token", "pos_embed"))


class _VqkdTraining:
    """What this training adds to a session: the step, the codebook, health, pictures, the file."""

    def __init__(
        self, config: VqkdConfig, teacher: VisualTokenizer, trainee: VqkdTrainee, session: Session
    ) -> None:
        self.config, self.teacher = config, teacher
        self.trainee, self.session = trainee, session

    def run(self) -> None:
        config, session = self.config, self.session
        optimizer = make_optimizer(
            self.trainee, decays=_decays, eps=config.train.eps,
            weight_decay=config.train.weight_decay, betas=config.train.betas,
        )  # fmt: skip
        if session.folder.continues is None:
            self._start_codebook()
        self.teacher.to(session.runtime.device)
        session.prepare(self.trainee, optimizer)
        parameters = sum(p.numel() for p in self.trainee.vqkd.parameters())
        session.announce(
            what=f"VQ-KD of size {config.model.size}, {config.model.vocabulary} codes of "
            f"{config.model.code_dim}, {parameters / 1e6:.2f} M parameters, views of "
            f"{config.data.token_size} pixels, teacher '{config.teacher.name}'",
            facts={"teacher": self.teacher.fingerprint},
        )
        session.train(
            self._step,
            session.data.batches(None, position=session.position),
            hooks=[
                Hook(config.output.evaluate_every, self._evaluate),
                Hook(config.output.picture_every, self._draw),
            ],
            after_update=self._move_codebook,
        )
        session.close()
        if session.is_first:
            self._finish()

    def _start_codebook(self) -> None:
        """Every rank looks at the same views, so that all start from the same codes."""
        train = self.session.data.train
        batches = self.session.data.fixed_batches(train, None, limit=_CLUSTERED, alone=True)
        view_BChw = to_unit(torch.cat([batch.token_view_BChw for batch in batches]))
        noise = torch_generator(Purpose.CODEBOOK, seed=self.config.seed)
        cluster(self.trainee, view_BChw, generator=noise)

    def _step(self, batch: Batch, moment: Moment) -> StepResult:
        loss, parts = self._forward(to_unit(batch.token_view_BChw))
        images = len(batch.token_view_BChw)
        parts = {"loss": loss.detach(), **parts}
        return StepResult(loss, {name: (v * images, images) for name, v in parts.items()})

    def _forward(self, view_BChw: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        feature_BNV = self.teacher.encode(view_BChw)
        commitment = self.config.objective.commitment
        loss, parts = self.session.runtime.model(view_BChw, feature_BNV, commitment=commitment)
        return loss, parts

    def _move_codebook(self, updates: int) -> None:
        objective = self.config.objective
        taken = self.trainee.taken_statistics()
        update_codebook(
            self.trainee,
            Statistics(*(self.session.runtime.sum(part) for part in taken)),
            decay=objective.decay,
            revive=objective.revive,
            generator=torch_generator(
                Purpose.CODEBOOK, seed=self.config.seed, epoch=1, sample=updates
            ),
        )

    @torch.no_grad()
    def _evaluate(self, updates: int) -> None:
        """How well codes tell what the teacher would say of held-out images, and their use."""
        runtime, meter, limit = self.session.runtime, Meter(), self.config.data.heldout_limit
        runtime.model.eval()
        for padded in self.session.data.fixed_batches(self.session.data.judged, None, limit=limit):
            batch = padded.to(runtime.device)
            view_BChw = to_unit(batch.token_view_BChw)[batch.index_B >= 0]
            parts = {"distillation": torch.zeros((), device=runtime.device)}
            if len(view_BChw):  # every rank adds the same names
                _, parts = self._forward(view_BChw)
            images = len(view_BChw)
            meter.add({"distillation": (parts["distillation"] * images, images)})
        runtime.model.train()
        health = token_health(runtime.sum(self.trainee.taken_statistics().count_V).long().cpu())
        distance = {"heldout_distillation": meter.means(runtime.sum)["distillation"]}
        self.session.record(updates, distance | words_in_use(health))
        warn_of_collapse(self.session, updates, health, remedy=_REMEDY)

    @torch.no_grad()
    def _draw(self, updates: int) -> None:
        if not self.session.is_first:
            return
        batch = next(
            self.session.data.fixed_batches(self.session.data.judged, None, limit=12, alone=True)
        )
        view_BChw = to_unit(batch.token_view_BChw.to(self.session.runtime.device))
        vqkd, patch = self.trainee.vqkd, self.config.model.patch_size
        target_BN = vqkd.nearest(vqkd.directions(view_BChw))
        side = view_BChw.shape[-1] // patch
        drawn_BChw = draw_codes(target_BN, vqkd.codebook_VC, grid=(side, side), patch=patch)
        save_picture(
            self.session, updates, {"token view": view_BChw, "codes as colours": drawn_BChw}
        )

    def _finish(self) -> None:
        session, path = self.session, self.session.folder.path
        how = {
            "config": self.config.model_dump(mode="json"),
            "teacher": self.teacher.fingerprint,
            "measured": session.summary,
        }
        vqkd = self.trainee.vqkd
        save_vqkd(path / "tokenizer.safetensors", vqkd, _settings(self.config, how))
        made = TOKENIZERS["vqkd"](path=str(path / "tokenizer.safetensors"))
        write_text(path / "tokenizer.md", _card(self.config, session.summary, made.fingerprint))
        session.finish()
        s, patch = session.summary, self.config.model.patch_size
        print(
            f"\nDone: {s['steps']} steps.\n"
            f"Held-out distance from the teacher: {s['heldout_distillation']:.4f}.\n"
            f"{use_in_words(s, vocabulary=self.config.model.vocabulary, noun='codes')}\n"
            f"Everything is in {path}: tokenizer.safetensors, tokenizer.md, pictures/.\n"
            + what_next(self.config, s, path, name="vqkd", patch=patch, remedy=_REMEDY),
            flush=True,
        )


def _card(config: VqkdConfig, summary: dict[str, Any], fingerprint: str) -> str:
    """What a person who finds the weights wants to know."""
    m = config.model
    teacher = json.dumps(config.teacher.model_dump(mode="json"))
    return f"""# A VQ-KD tokenizer

BEiT v2's architecture at size {m.size}: one of {m.vocabulary} codes of {m.code_dim} numbers for \
{m.patch_size} x {m.patch_size} pixels.
Trained by `tools/train_tokenizer.py` for {summary["steps"]} steps of {config.train.batch_size} \
views of {config.data.token_size} pixels
from `{config.data.train}`, seed {config.seed}, to say what this teacher says: `{teacher}`.

| measured on held-out images | |
|---|---|
| distance from the teacher (its loss) | {summary["heldout_distillation"]:.4f} |
{use_in_rows(summary, vocabulary=m.vocabulary, noun="code")}

{where_it_is_from(fingerprint)}

Use: `tokenizer.name=vqkd tokenizer.path=tokenizer.safetensors`, views of a size that is a \
multiple of {m.patch_size}.
"""
