"""One process for each job: what it leaves behind, and how it ends.

On a CPU processes are forked from a server that has imported torch and DeepSpeed once: a start in
a hundredth of a second instead of ten. With CUDA, which cannot be forked, they are started afresh.
"""

import ctypes
import json
import multiprocessing
import os
import resource
import signal
import site
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mimkit.errors import UserError
from mimkit.files import write_text

_PRELOADED = ["mimkit.pretraining", "mimkit.ablation.jobs"]
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Ended:
    """How a job ended, and what it took.

    Attributes:
        error: one line or more, None for success.
        wall: seconds.
        process: seconds of processor time, loader processes included.
        memory_mib: most that was resident, the job and its largest loader process together.
    """

    error: str | None
    wall: float
    process: float
    memory_mib: float


@dataclass(frozen=True)
class Job:
    """`action` is a function of a module, `arguments` can be pickled."""

    action: Callable[..., None]
    arguments: dict[str, Any]
    log: Path
    result: Path  # JSON of `Ended`


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
    with _environment(_this_code()):
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


def start(job: Job, context: ForkServerContext | SpawnContext, environment: dict[str, str]
          ) -> BaseProcess:  # fmt: skip
    job.result.unlink(missing_ok=True)
    for file in (job.log, job.result):
        file.parent.mkdir(parents=True, exist_ok=True)
    process = context.Process(target=_live, args=(job, environment | _this_code()))
    process.start()
    return process


def read_ended(job: Job, exit_code: int | None) -> Ended:
    """What the process wrote, or that it could not."""
    if job.result.exists():
        return Ended(**json.loads(job.result.read_text(encoding="utf-8")))
    number = -(exit_code or 0)
    by = f"signal {signal.Signals(number).name}" if number > 0 else f"exit code {exit_code}"
    hint = "; SIGKILL often means that memory ran out" if number == signal.SIGKILL else ""
    return Ended(f"the process ended with {by}{hint}; see {job.log}", 0.0, 0.0, 0.0)


def _live(job: Job, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    # loader processes are started as in any other run, not by the server that started this one
    multiprocessing.set_start_method(None, force=True)
    _end_with_study()
    _redirect(job.log)
    begun, error = time.perf_counter(), None
    try:
        job.action(**job.arguments)
    except UserError as problem:
        error = str(problem)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as problem:  # whatever ends a run goes into the report of the study
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"
    wall = time.perf_counter() - begun
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    process = sum(one.ru_utime + one.ru_stime for one in used)
    memory = sum(one.ru_maxrss for one in used) / 1024
    write_text(job.result, json.dumps(asdict(Ended(error, wall, process, memory))))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)  # threads of process groups can abort a slow end


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def _end_with_study() -> None:
    """A study that is killed leaves no run behind that would go on unseen and hold its folder.

    The server that forked this process is no witness: it lives as long as any process it made.
    """
    study = multiprocessing.parent_process()
    assert study is not None, "a job is started by `start`"

    def watch() -> None:
        study.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_with_this_process() -> None:
    """For `preexec_fn`: the new program is told to stop when this process is gone."""
    if _LIBC is not None:
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGTERM)
