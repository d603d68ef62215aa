"""Runs of `mimkit pretrain` in forked processes: started, watched, ended, compared."""

import functools
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mimkit.data._kernels import load_kernels
from mimkit.ports import free_port
from mimkit.train import checkpoint

STEPS, SAVED_EVERY = 12, 3
_WORDS = (
    "stem=linear", "encoder.size=Ti", "encoder.depth=1", f"train.steps={STEPS}",
    "train.batch_size=8", "train.warmup=0.1", "train.ema=0.9", "encoder.drop_path=0.2",
    "data.image_size=64", "data.token_size=32", "data.heldout_limit=16",
    "probe.train_limit=24", "probe.heldout_limit=8",
    "engine.precision=fp32", "engine.threads=1", "engine.workers=1", "output.log_every=2",
    f"output.checkpoint_every={SAVED_EVERY}", "output.evaluate_every=6",
    f"output.picture_every={STEPS}", "output.tensorboard=false", "output.keep_checkpoints=4",
)  # fmt: skip
_TOLERANCE = 1e-5  # of losses, between one rank and two
PATIENCE = 900  # seconds for what has no limit of its own: this machine may be busy
Break = Callable[[], None]


class BrokenPromiseError(Exception):
    """A run did not do what it promises."""


def expect(held: object, otherwise: str) -> None:
    if not held:
        raise BrokenPromiseError(otherwise)


@dataclass
class Process:
    """A rank: one `mimkit pretrain` of one process.

    Attributes:
        log: what it writes to stdout and stderr.
    """

    pid: int
    log: Path
    code: int | None = field(default=None)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def is_running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def wait(self, seconds: float) -> int:
        """The exit code, negative for a signal; killed and a broken promise after `seconds`."""
        limit = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() > limit:
                self.send(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.code = -signal.SIGKILL
                raise BrokenPromiseError(f"a rank was still running after {seconds:.0f} s")
            time.sleep(0.01)
        assert self.code is not None
        return self.code

    def said(self) -> str:
        """In one line, without the progress bars."""
        lines = self.log.read_text(encoding="utf-8").replace("\r", "\n").splitlines()
        return " ".join(" ".join(line for line in lines if "step/s" not in line).split())


class Bench:
    """Where drills run; makes what several of them need, once."""

    def __init__(self, folder: Path, *, kills: int, save_kills: int) -> None:
        self.folder, self.kills, self.save_kills = folder, kills, save_kills
        importlib.import_module("mimkit.pretraining")  # once, before all forks
        load_kernels()
        self.draw = random.Random()
        self._count = 0

    def new_folder(self, name: str) -> Path:
        self._count += 1
        return self.folder / f"{self._count:03d}-{name}"

    def start(
        self, run: Path, words: Sequence[str] = (), *, ranks: int = 1, breaks: Sequence[Break] = ()
    ) -> list[Process]:
        """The run in `run`, one process a rank; a second start of a folder continues it.

        Args:
            breaks: of each rank, something to do in its process before it starts.
        """
        self._count += 1
        port = free_port()
        runtime = "local" if ranks == 1 else "deepspeed"
        words = [*_WORDS, f"engine.runtime={runtime}", f"output.dir={run}", *words]
        return [
            _fork(
                words,
                log=self.folder / f"{self._count:03d}-rank-{rank}.log",
                environment={} if ranks == 1 else _of_rank(rank, ranks, port),
                breaks=breaks[rank] if rank < len(breaks) else lambda: None,
            )
            for rank in range(ranks)
        ]

    def finish(self, run: Path, words: Sequence[str] = (), *, ranks: int = 1) -> str:
        """Starts or continues the run and waits for its end; what rank 0 said."""
        processes = self.start(run, words, ranks=ranks)
        for process in processes:
            code = process.wait(PATIENCE)
            expect(code == 0, f"going on ended with code {code}: {process.said()[-600:]}")
        return processes[0].said()

    @cached_property
    def _undisturbed(self) -> tuple[Path, float]:
        run, started = self.new_folder("undisturbed"), time.monotonic()
        self.finish(run)
        return run, time.monotonic() - started

    @property
    def undisturbed(self) -> Path:
        """A run that nothing happened to."""
        return self._undisturbed[0]

    @property
    def seconds(self) -> float:
        """What that took."""
        return self._undisturbed[1]

    def half_done(self, name: str) -> Path:
        """A copy of the undisturbed run as it was when it had saved its last checkpoint."""
        run = self.new_folder(name)
        shutil.copytree(self.undisturbed, run)
        (run / "summary.json").unlink()
        return run

    def without_last(self, name: str) -> Path:
        """And one from before that."""
        run = self.half_done(name)
        shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
        return run


def _of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port)}  # fmt: skip


def _fork(words: list[str], *, log: Path, environment: dict[str, str], breaks: Break) -> Process:
    sys.stdout.flush()
    sys.stderr.flush()
    log.touch()
    pid = os.fork()
    if pid:
        return Process(pid, log)
    code = 99
    try:
        os.setsid()  # a Ctrl-C at the terminal is the drill's
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= environment
        breaks()
        from mimkit.cli import main

        code = main(["pretrain", *words])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)


def change_step(change: Callable[[Any], Any], *, update: int | None = None) -> None:
    """In this process what the step gives is changed: in every update, or in that one, once."""
    pretraining: Any = importlib.import_module("mimkit.pretraining")
    step, count = pretraining.mim_step, itertools.count(1)

    @functools.wraps(step)
    def changed(*arguments: Any, **named: Any) -> Any:
        result = step(*arguments, **named)
        return change(result) if update in (None, next(count)) else result

    pretraining.mim_step = changed


def linger(result: Any) -> Any:
    """For `change_step`: so that what is to hit a certain update does, on a busy machine too."""
    time.sleep(0.1)
    return result


def updates_done(run: Path) -> int:
    """By the lines of metrics."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return max((json.loads(line)["step"] for line in lines), default=0)


def wait_for_update(processes: Sequence[Process], run: Path, update: int) -> None:
    limit = time.monotonic() + PATIENCE
    while updates_done(run) < update:
        for process in processes:
            if not process.is_running():
                raise BrokenPromiseError(f"it ended too early: {process.said()[-600:]}")
        expect(time.monotonic() < limit, f"update {update} was not reached in {PATIENCE} s")
        time.sleep(0.005)


def _lines(run: Path) -> list[tuple[Any, ...]]:
    """What metrics say of losses, but no times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["kind"] in ("train", "heldout")]
    for line in kept:
        line.pop("images_per_second", None)
    return [tuple(sorted(line.items())) for line in kept]


def expect_equal(run: Path, other: Path) -> None:
    """Bit for bit: metrics, weights, moments, average."""
    expect((run / "summary.json").exists(), "it did not finish")
    expect(_lines(run) == _lines(other), "its metrics differ from those of the undisturbed run")
    one, two = (checkpoint.load(r / "checkpoints" / f"step-{STEPS:08d}") for r in (run, other))
    for name, tensors in one.tensors().items():
        others = two.tensors()[name]
        expect(tensors.keys() == others.keys(), f"{name} holds other tensors")
        far = [key for key in tensors if not torch.equal(tensors[key], others[key])]
        expect(not far, f"{name} differs from the undisturbed run's in {len(far)} tensors")


def expect_close(run: Path, other: Path) -> None:
    """Losses within the tolerance between numbers of ranks."""
    expect((run / "summary.json").exists(), "it did not finish")
    one, two = (
        {(dict(line)["step"], dict(line)["kind"]): dict(line) for line in _lines(r)}
        for r in (run, other)
    )
    expect(one.keys() == two.keys(), "its metrics have other lines than the undisturbed run's")
    for key, line in one.items():
        name = "loss" if key[1] == "train" else "heldout_loss"
        far = abs(line[name] - two[key][name])
        expect(far < _TOLERANCE * 10, f"the loss at update {key[0]} differs by {far:.1e}")
