"""One finetuning, or supervised training from scratch, from a configuration to a summary."""

import copy
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mimkit import build
from mimkit.batch import Batch
from mimkit.classifier_io import BEST, Classifier, Weights, keep_best, open_best, write_classifier
from mimkit.config import FinetuneConfig
from mimkit.data.class_labels import Classes, agreed_classes, notes_on_classes
from mimkit.data.overlap import shared_images
from mimkit.data.sources import Source
from mimkit.downstream.predictions import FILE, Predictions
from mimkit.downstream.scores import Scores, classification_scores
from mimkit.errors import UserError
from mimkit.finetuning_parts import Start, load_start, make_classifier, settled
from mimkit.finetuning_report import report
from mimkit.kernels import check_kernels, choose_kernels
from mimkit.models.blocks import drop_path_of_update, drop_path_rates
from mimkit.models.classifier import ImageClassifier
from mimkit.models.moved import moved_by_role, unequal
from mimkit.models.roles import decays, learning_rate_scales, role_of
from mimkit.runs import RunFolder
from mimkit.session import Session
from mimkit.train.classification_step import classification_step, make_loss, predict_all
from mimkit.train.loop import Hook, Moment
from mimkit.train.mixing import Mixing
from mimkit.train.optimizer import make_optimizer
from mimkit.train.runtimes import plain_weights
from mimkit.train.step import StepResult

_AT_ONCE = 64  # images judged in one forward, on any number of ranks: so all round alike


def run(config: FinetuneConfig, *, started_at: float) -> RunFolder:
    """Trains, judges and tests; returns the run folder (`finished` if it was already).

    Args:
        started_at: when the command was given (seconds since the epoch), for the summary.

    Raises:
        UserError: before any training, where encoder, data and settings do not fit together.
    """
    config = settled(config)
    _check(config)
    check_kernels(config.engine)
    start = load_start(config)
    session = Session(config, views=None, bf16=build.use_bf16(config.engine), started_at=started_at)
    if not session.folder.finished:
        with session.tidy():
            with session.told_once():
                training = _Finetuning(config, start, session)
            training.run()
    return session.folder


def _check(config: FinetuneConfig) -> None:
    engine = config.engine
    if config.train.optimizer == "lamb" and engine.runtime == "deepspeed" and engine.zero_stage:
        raise UserError(
            "train.optimizer=lamb scales each layer's step by that layer's own norm, and ZeRO "
            f"stage {engine.zero_stage} hands the optimizer flat shards that are no layers; set "
            "engine.zero_stage=0, or train.optimizer=adamw"
        )


class _Finetuning:
    """What this training adds to a session: the step, the judging, the best weights, the test."""

    def __init__(self, config: FinetuneConfig, start: Start, session: Session) -> None:
        self.config, self.start, self.session = config, start, session
        self.test = build.open_test(config.data)
        self.classes = self._agreed()
        self.model = make_classifier(start, config, self.classes)
        self.pixels: dict[str, Any] = start.pixels._asdict()
        self.view = build.build_training_view(config.data, mean=start.pixels.mean)
        self.mixing = self._mixing()
        self.loss = make_loss(
            config.train.loss, mixing=self.mixing, threshold=config.train.bce_threshold
        )
        self.rates_L = drop_path_rates(self.model.encoder.depth, config.model.drop_path)
        self.best = -1.0  # top-1 on held-out images

    def _agreed(self) -> Classes:
        classes = agreed_classes(self._splits(), stated=self.config.model.classes)
        self.start.notes += notes_on_classes(self._splits(), classes)
        return classes

    def _splits(self) -> dict[str, Source]:
        data = {"data.train": self.session.data.train, "data.heldout": self.session.data.heldout,
                "data.test": self.test}  # fmt: skip
        return {setting: source for setting, source in data.items() if source is not None}

    def _mixing(self) -> Mixing:
        train = self.config.train
        mixing = Mixing(num_classes=self.classes.num, mixup=train.mixup, cutmix=train.cutmix,
                        smoothing=train.smoothing, group=train.mix_group, seed=self.config.seed,
                        erasing=self.config.data.erasing)  # fmt: skip
        mixing.check(micro_batch=self.session.plan.micro_batch)
        return mixing

    def run(self) -> None:
        config, session, model = self.config, self.session, self.model
        train = config.train
        self.before = plain_weights(model)
        self.roles = role_of(model)
        optimizer = make_optimizer(
            model, decays=decays, weight_decay=train.weight_decay, betas=train.betas,
            eps=train.eps, name=train.optimizer,
            scales=learning_rate_scales(model, decay=train.layer_decay),
        )  # fmt: skip
        self.plain = _twin(model)
        self._recall_best()
        what = self._what()  # ZeRO stage 3 takes the parameters to pieces
        if session.is_first:
            print("".join(f"note: {note}\n" for note in self._notes()), end="", flush=True)
        kernels = choose_kernels(model, model.encoder, engine=config.engine, session=session)
        session.prepare(model, optimizer, ema=train.ema)
        facts = {"init_digest": self.start.digest(), **self.start.code(), **kernels,
                 "test_digest": self.test.digest if self.test else None}  # fmt: skip
        session.announce(what=what, facts=facts)
        batches = session.data.batches(
            None, position=session.position, view=self.view, repeats=config.data.repeats
        )
        weights = session.train(self._step, batches, hooks=self._hooks())
        self._tell_moved(weights)
        if session.data.heldout is None:  # nobody can say which were best: the last ones are kept
            self._keep(session.plan.steps, session.averaged_weights() or weights, None)
        self._look_at_test()
        session.close()
        if session.is_first:
            session.finish()
            delta_of = config.init if config.output.delta else None
            print(report(session.summary, session.folder.path, delta_of=delta_of), flush=True)

    def _notes(self) -> list[str]:
        """What was done to the encoder, and images of the test set that are trained on."""
        notes = list(self.start.notes)
        train, heldout = self.session.data.train, self.session.data.heldout
        if self.test is not None and heldout is not None and self.test.digest == heldout.digest:
            notes.append("data.test are the images of data.heldout, by which the best weights are "
                         "chosen: their score flatters a little")  # fmt: skip
        if self.test is not None and (shared := shared_images(train, self.test)).same:
            self.session.summary["test_images_trained_on"] = shared.estimate
            notes.append(
                f"about {shared.estimate} of the {len(self.test)} images in data.test are trained "
                f"on ({shared.same} of {shared.compared} that were compared, by key and bytes)"
            )
        return notes

    def _what(self) -> str:
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in self.model.parameters())
        self.session.summary |= {"trained_parameters": trained, "parameters": total,
                                 "classes": self.classes.num,
                                 "patches": math.prod(self.model.encoder.grid)}  # fmt: skip
        encoder, roles = self.model.encoder, ", ".join(self.config.train.roles)
        branches = f" of {encoder.branches} branches" if encoder.branches > 1 else ""
        height, width = (side * self.model.stem.patch_size for side in encoder.grid)
        return (
            f"{self.model.stem.name} stem, width {encoder.width}, {encoder.depth} "
            f"block{'s' if encoder.depth > 1 else ''}{branches}, {height}x{width} pixels, "
            f"{self.classes.num} classes, from {self.config.init or 'scratch'}; trains {roles}: "
            f"{trained / 1e6:.2f} of {total / 1e6:.2f} M parameters ({trained / total:.1%})"
        )

    def _step(self, batch: Batch, moment: Moment) -> StepResult:
        return classification_step(
            self.session.runtime.model, batch, loss=self.loss, mixing=self.mixing,
            update=moment.updates, rows=moment.rows, keep_LB2R=self._drop_path(moment),
            **self.pixels,
        )  # fmt: skip

    def _drop_path(self, moment: Moment) -> Tensor | None:
        return drop_path_of_update(
            self.rates_L, seed=self.config.seed, update=moment.updates, rows=moment.rows,
            batch=self.session.plan.batch_size, branches=self.model.encoder.branches,
            device=self.session.runtime.device,
        )  # fmt: skip

    def _hooks(self) -> list[Hook]:
        if self.session.data.heldout is None:
            return []
        return [Hook(self.config.output.evaluate_every, self._evaluate)]

    def _evaluate(self, updates: int) -> None:
        session, heldout = self.session, self.session.data.heldout
        assert heldout is not None
        with session.judged_weights():
            predictions = self._predict(session.runtime.model, heldout)
            scores = classification_scores(predictions)
            better = scores.top1.value > self.best
            weights = session.runtime.weights() if better else {}
        session.record(updates, _numbers("heldout", scores))
        if better:
            self.best = scores.top1.value
            self._keep(updates, weights, predictions)

    def _predict(self, model: nn.Module, source: Source) -> Predictions:
        """All ranks call it and get the same."""
        session = self.session
        batches = session.data.fixed_batches(
            source, None, limit=len(source), view=build.build_judged_view(self.config.data),
            batch_size=_AT_ONCE,
        )  # fmt: skip
        found = predict_all(
            model, batches, images=len(source), best=min(5, self.classes.num),
            device=session.runtime.device, sum_over_ranks=session.runtime.sum, **self.pixels,
        )  # fmt: skip
        return Predictions(
            index_B=torch.arange(len(source)), label_B=torch.from_numpy(source.labels).long(),
            best_BK=found.best_NK, log_confidence_B=found.log_confidence_N,
            log_probability_B=found.log_probability_N, num_classes=self.classes.num,
            source=source.digest, classes=self.classes.names,
            made_by={"run": session.folder.path.resolve().name, "seed": str(self.config.seed)},
        )  # fmt: skip

    def _keep(self, updates: int, weights: Weights, predictions: Predictions | None) -> None:
        """As run folder/best, on rank 0."""
        if self.session.is_first:
            self.plain.load_state_dict(dict(weights))
            write = partial(self._write_best, updates=updates, predictions=predictions)
            keep_best(self.session.folder.path, updates, write)

    def _write_best(self, folder: Path, *, updates: int, predictions: Predictions | None) -> None:
        about = {"mimkit_run": self.session.folder.path.resolve().name, "update": str(updates),
                 "init": str(self.config.init)}  # fmt: skip
        classifier = Classifier(self.plain, self.start.pixels, self.classes.names, about)
        base = self.start.weights if self.config.output.delta else None
        write_classifier(folder, classifier, base=base)
        score = None if predictions is None else float(predictions.correct.double().mean())
        (folder / "best.json").write_text(json.dumps({"update": updates, "heldout_top1": score}))
        if predictions is not None:
            predictions.save(folder / FILE)

    def _recall_best(self) -> None:
        """What an interrupted run had kept; a run that goes on must beat it."""
        path = self.session.folder.path / BEST / "best.json"
        if self.session.folder.continues and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))["heldout_top1"]
            self.best = -1.0 if found is None else float(found)

    def _tell_moved(self, weights: Weights) -> None:
        """Into the summary, by role; our own mistake where something frozen moved."""
        frozen = [n for n, p in self.model.named_parameters() if not p.requires_grad]
        if self.model.still_stem:
            frozen += [f"stem.{n}" for n, _ in self.model.stem.named_buffers()]
        frozen = [name for name in frozen if name in self.before]
        if moved := unequal(self.before, weights, frozen):
            raise RuntimeError(f"frozen, but moved: {', '.join(moved)}")
        table = moved_by_role(self.before, weights, self.roles)
        self.session.summary["moved"] = {
            kind: {**row._asdict(), "distance": _json_number(row.distance)}
            for kind, row in table.items()
        }

    def _look_at_test(self) -> None:
        """The best weights, read back from disk, on the images that chose nothing."""
        session = self.session
        session.runtime.from_rank_0(None)  # rank 0 has written them
        chosen = json.loads((session.folder.path / BEST / "best.json").read_text(encoding="utf-8"))
        session.summary |= {"best_update": chosen["update"], "best_top1": chosen["heldout_top1"]}
        if self.test is not None:
            with session.stopwatch.lap("test"):
                self._test(self.test)

    def _test(self, test: Source) -> None:
        session = self.session
        best = open_best(session.folder.path / BEST, self.start.weights)
        device = session.runtime.device
        with torch.autocast(device.type, torch.bfloat16, enabled=session.rule.bf16):
            predictions = self._predict(best.model.to(device), test)
        session.summary |= _numbers("test", classification_scores(predictions))
        if session.is_first:
            predictions.save(session.folder.path / "test" / FILE)


def _twin(model: ImageClassifier) -> ImageClassifier:
    """A copy that the engine never sees, to write files from."""
    return copy.deepcopy(model).requires_grad_(False)


def _numbers(split: str, scores: Scores) -> dict[str, float]:
    values = {"top1": scores.top1.value, "loss": scores.nll, "ece": scores.ece,
              "balanced": scores.balanced, "images": float(scores.top1.total),
              "top1_low": scores.top1.low, "top1_high": scores.top1.high}  # fmt: skip
    if scores.top5 is not None:
        values["top5"] = scores.top5.value
    return {f"{split}_{name}": value for name, value in values.items()}


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
