"""Repeat the update that went wrong, on one CPU, and name the sample or the layer.

The weights are those of the newest checkpoint before it; the updates between are made again by
plain PyTorch in one process, whatever engine and ranks the run had: the batches are the same, and
on a CPU in fp32 so is every number (`audit engine`). Then the update itself is made with an eye on
every module, every sample and every gradient.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mimkit import build
from mimkit.batch import Batch
from mimkit.config import TrainConfig, load_config
from mimkit.errors import UserError
from mimkit.pretraining import Pretraining, make_parts
from mimkit.replay._dump import Dump, read_dump
from mimkit.replay._watch import Origin, Watch
from mimkit.runs import RunFolder
from mimkit.session import Session
from mimkit.train import checkpoint
from mimkit.train.loop import Moment, train
from mimkit.train.nonfinite import NonFinite
from mimkit.train.optimizer import set_learning_rate, set_weight_decay

_SPIKE = 3.0  # times the median loss of the samples


@dataclass(frozen=True)
class Suspect:
    """A sample of the batch, by what it is and where it lies."""

    row: int  # in the global batch
    index: int
    key: str
    origin: str
    loss: float | None


@dataclass(frozen=True)
class Replayed:
    """What was found in an update."""

    dump: Dump
    update: int  # done before it
    start: int  # updates of the checkpoint that the replay began with
    recorded_loss: float | None
    loss: float
    origins: list[Origin]  # what is not finite, in the order in which it appeared
    suspects: list[Suspect]  # samples that it is about; else those whose loss sticks out

    @property
    def found(self) -> bool:
        return bool(self.origins or self.suspects)


def replay(
    path: Path, *, update: int | None = None, say: Callable[[str], None] = lambda text: None
) -> Replayed:
    """Repeats the update in which a dump says that things went wrong, or another one.

    Args:
        path: of the dump.
        update: its number as metrics count (1 is the first); None takes the dump's suspect.
        say: is told how far it is.

    Raises:
        UserError: the dump or its run cannot be read; the samples are others than those recorded.
    """
    dump = read_dump(path)
    number = dump.suspect if update is None else update - 1
    with tempfile.TemporaryDirectory(prefix="mimkit-replay-") as scratch:
        training = _open(dump, Path(scratch), number=number)
        session = training.session
        training.prepare()
        say(f"update {session.start} is the start, update {number + 1} is to be repeated")
        batches = training.batches(position=_position(dump, session, number))
        if session.start < number:
            _advance(training, batches, until=number)
        watch, indices, loss = _repeat(training, batches, number)
    _check_samples(dump, number, indices)
    return Replayed(
        dump, number, session.start, dump.recorded_loss(number), loss, watch.origins,
        _suspects(watch, indices, training),
    )  # fmt: skip


def _open(dump: Dump, scratch: Path, *, number: int) -> Pretraining:
    """The run's training in one process on the CPU, with the same global batches."""
    path = dump.run / "config.yaml"
    if not path.exists():
        raise UserError(f"{dump.run} has no config.yaml: keep a dump in the folder of its run")
    if "objective:" in path.read_text(encoding="utf-8"):
        raise UserError(f"{dump.run} is the training of a tokenizer; replays are of pretrainings")
    facts = dump.facts
    config = load_config(path, [
        "engine.runtime=local", "engine.zero_stage=0", "engine.deepspeed_config=null",
        f"engine.accumulation={facts['accumulation']}", f"engine.precision={facts['precision']}",
        "engine.activation_checkpointing=false", "engine.workers=0", f"output.dir={scratch}/run",
    ])  # fmt: skip
    folder = RunFolder(scratch / "run", _before(dump.run, number), finished=False)
    session = Session(config, views=config.data, bf16=facts["precision"] == "bf16",
                      started_at=0.0, folder=folder)  # fmt: skip
    if not 0 <= number < session.plan.steps:
        raise UserError(f"--update is {number + 1}; the run has updates 1 to {session.plan.steps}")
    return Pretraining(config, make_parts(config), session)


def _before(run: Path, number: int) -> Path | None:
    """The newest checkpoint that has not more than `number` updates; None is the very start."""
    states = {path: checkpoint.read_state(path)["updates"]
              for path in (run / "checkpoints").glob("step-*")}  # fmt: skip
    fitting = [path for path, updates in states.items() if updates <= number]
    return max(fitting, key=states.__getitem__, default=None)


def _position(dump: Dump, session: Session, number: int) -> int | None:
    """Of the first sample after the checkpoint, as the run had it on its way to the update: a run
    that went back to that checkpoint went on from it with other samples."""
    known = dump.position(number)
    return known if known is None else known - (number - session.start) * session.plan.batch_size


def _advance(training: Pretraining, batches: Iterator[Batch], *, until: int) -> None:
    session = training.session
    train(
        runtime=session.runtime, optimizer=session.optimizer, step=training.step, batches=batches,
        plan=replace(session.plan, steps=until), start=session.start, hooks=(), recorder=None,
        learning_rate=build.build_schedule(training.config.train, session.plan.steps),
        weight_decay=build.build_weight_decay(training.config.train, session.plan.steps),
        nonfinite=_as_in_the_run(training.config.train),
    )  # fmt: skip


def _as_in_the_run(settings: TrainConfig) -> NonFinite:
    """Updates that the run skipped are skipped again. Between a checkpoint and an update that can
    be repeated there is none that it went back from."""
    skips = settings.on_nonfinite == "skip"
    return NonFinite(policy="skip" if skips else "stop", allowed=settings.max_nonfinite)


def _repeat(
    training: Pretraining, batches: Iterator[Batch], number: int
) -> tuple[Watch, list[int], float]:
    """What was seen, the samples row by row, and the loss of the global batch."""
    session, watch, indices, total = training.session, Watch(), list[int](), 0.0
    model, tokenizer = training.parts.model, training.parts.tokenizer
    train_settings, steps = training.config.train, session.plan.steps
    set_learning_rate(session.optimizer, build.build_schedule(train_settings, steps)(number))
    if (weight_decay := build.build_weight_decay(train_settings, steps)) is not None:
        set_weight_decay(session.optimizer, weight_decay(number))
    watch.parameters(model, when="before the update")
    for micro in range(session.plan.accumulation):
        first = micro * session.plan.micro_batch
        rows = slice(first, first + session.plan.micro_batch)
        batch = next(batches)
        indices += batch.index_B.tolist()
        with watch.forward(model, rows=len(batch.index_B), first_row=first):
            predicted_MV, target_M = training.predict(batch, Moment(number, rows))
        watch.losses(tokenizer, predicted_MV, target_M, batch.mask_BN, first_row=first)
        loss = tokenizer.loss(predicted_MV, target_M)
        total += float(loss.detach()) / session.plan.accumulation
        with watch.backward(model):
            session.runtime.backward(loss)
    watch.parameters(model, when="after the update")
    return watch, indices, total


def _check_samples(dump: Dump, number: int, indices: list[int]) -> None:
    for row, recorded in dump.index(number).items():
        if indices[row : row + len(recorded)] != recorded:
            raise UserError(
                f"the samples of update {number + 1} are others than those recorded (from row "
                f"{row} on: {indices[row]}..., recorded {recorded[0]}...); is the data the same?"
            )


def _suspects(watch: Watch, indices: list[int], training: Pretraining) -> list[Suspect]:
    """Of the first origin that is about single samples; else those with by far the largest loss."""
    rows = next((list(o.rows) for o in watch.origins if 0 < len(o.rows) < len(indices)), [])
    if not watch.origins:
        losses = sorted(watch.sample_losses)
        limit = _SPIKE * losses[len(losses) // 2]
        rows = [row for row, loss in enumerate(watch.sample_losses) if loss > limit]
    return [_suspect(row, watch, indices, training) for row in rows]


def _suspect(row: int, watch: Watch, indices: list[int], training: Pretraining) -> Suspect:
    sample = training.session.data.train[indices[row]]
    loss = watch.sample_losses[row] if row < len(watch.sample_losses) else None
    return Suspect(row, sample.index, sample.key, sample.origin, loss)
