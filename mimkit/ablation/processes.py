"""One process for each job: how it starts and ends, and what it leaves behind.

On a CPU processes are forked from a server that has imported torch and DeepSpeed once: a start in
a hundredth of a second instead of ten. With CUDA, which cannot be forked, they are started afresh.
"""

import ctypes
import multiprocessing
import os
import signal
import site
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mimkit.ablation.spent import Spent, read_spent, write_spent
from mimkit.errors import Interrupted, UserError
from mimkit.interrupts import held_back, interruptible, let_in

_PRELOADED = ["mimkit.pretraining", "mimkit.ablation.jobs"]
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Ended:
    """How an attempt at a job ended.

    Attributes:
        error: one line or more, None for success.
        wall: seconds of this attempt.
    """

    error: str | None
    wall: float


@dataclass(frozen=True)
class Job:
    """`action` is a function of a module, `arguments` can be pickled."""

    action: Callable[..., None]
    arguments: dict[str, Any]
    log: Path
    result: Path  # JSON of its error and of what it `Spent`


def process_context(*, cuda: bool, engine: str) -> ForkServerContext | SpawnContext:
    """Where processes come from; a server that forks them is started.

    Args:
        engine: the package that trains, imported once too: deepspeed, where it is not plain torch.
    """
    if cuda:
        return multiprocessing.get_context("spawn")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it looked for others
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *([engine] if engine != "local" else [])])
    resource_tracker.ensure_running()  # the server would start it, and let signals in again
    # a signal to the whole group (Slurm) must not end the server: nobody would wait for its jobs
    with _environment(_this_code()), held_back():
        forkserver.ensure_running()
    return context


def _this_code() -> dict[str, str]:
    """What lets a new Python import this mimkit, not one that is installed or in its folder."""
    root = str(Path(__file__).parents[2])
    found = {"PYTHONSAFEPATH": "1"}  # no working folder; from Python 3.11 on
    if root not in site.getsitepackages():
        paths = [root, os.environ.get("PYTHONPATH")]
        found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return found


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


@dataclass(frozen=True)
class Attempt:
    """A process that works at a job."""

    job: Job
    process: BaseProcess
    before: Spent  # of the job's earlier attempts
    begun: float  # by time.perf_counter

    def wait(self) -> Ended:
        """What the process wrote, or that it could not; for one thread only."""
        self.process.join()
        wall = time.perf_counter() - self.begun
        error, spent = read_spent(self.job.result)
        if spent.attempts == self.before.attempts:
            error = _killed(self.process.exitcode, self.job.log)
            write_spent(self.job.result, error, self.before.and_killed(wall))
        return Ended(error, wall)


def start(job: Job, context: ForkServerContext | SpawnContext, environment: dict[str, str]
          ) -> Attempt:  # fmt: skip
    for file in (job.log, job.result):
        file.parent.mkdir(parents=True, exist_ok=True)
    before, begun = read_spent(job.result)[1], time.perf_counter()
    process = context.Process(target=_live, args=(job, environment | _this_code()))
    process.start()
    return Attempt(job, process, before, begun)


def _killed(exit_code: int | None, log: Path) -> str:
    number = -(exit_code or 0)
    by = f"signal {signal.Signals(number).name}" if number > 0 else f"exit code {exit_code}"
    hint = "; SIGKILL often means that memory ran out" if number == signal.SIGKILL else ""
    return f"the process ended with {by}{hint}; see {log}"


def _live(job: Job, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    # loader processes are started as in any other run, not by the server that started this one
    multiprocessing.set_start_method(None, force=True)
    before, begun = read_spent(job.result)[1], time.perf_counter()

    def leave(error: str | None) -> None:
        write_spent(job.result, error, before.and_this_process(time.perf_counter() - begun))

    _end_with_study(leave)
    _redirect(job.log)
    error = _outcome(job)
    leave(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)  # threads of process groups can abort a slow end


def _outcome(job: Job) -> str | None:
    """Does it; None, or why it was not done."""
    try:
        with interruptible(), let_in():
            job.action(**job.arguments)
    except UserError as problem:
        return str(problem)
    except Interrupted as asked:
        return f"stopped by {asked.signal}: {asked.done}"
    except KeyboardInterrupt:
        return "stopped by SIGINT: it was not training"
    except BaseException as problem:  # whatever ends a run goes into the report of the study
        traceback.print_exc()
        return f"{type(problem).__name__}: {problem}"
    return None


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def _end_with_study(leave: Callable[[str], None]) -> None:
    """A study that is killed leaves no run behind that would go on unseen and hold its folder.

    The server that forked this process is no witness: it lives as long as any process it made.

    Args:
        leave: told why, before this process ends.
    """
    study = multiprocessing.parent_process()
    assert study is not None, "a job is started by `start`"

    def watch() -> None:
        study.join()
        try:
            leave("the study ended before it")
        finally:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_with_this_process() -> None:
    """For `preexec_fn`: the new program is told to stop when this process is gone."""
    if _LIBC is not None:
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGTERM)
