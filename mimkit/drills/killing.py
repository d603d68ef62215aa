"""kill -9: in training at random moments, and in saving, at random and after every call."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from mimkit.config import Config, load_config
from mimkit.drills import Drill
from mimkit.drills._runs import Bench, BrokenPromiseError, expect, expect_equal
from mimkit.resources import configs_folder
from mimkit.runs import RunFolder, choose_run_folder, lock, write_start
from mimkit.train import checkpoint

_LARGE, _SMALL = 1 << 19, 1 << 10  # numbers in each tensor: 2 MiB, so that writing takes a while
_CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def in_training(bench: Bench) -> str:
    """At any moment from the first import to the summary. What a run takes is learnt on the way: it
    changes with what else the machine does."""
    whole, killed = bench.seconds, 0
    for number in range(bench.kills):
        run = bench.new_folder(f"killed-{number}")
        [process] = bench.start(run)
        seconds = _kill_after(bench.draw.uniform(0, whole), process.pid)
        killed += seconds is None
        whole = _learnt(whole, seconds)
        try:
            bench.finish(run)
            expect_equal(run, bench.undisturbed)
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"kill {number + 1} of {bench.kills}: {error}") from error
        shutil.rmtree(run)
    return f"{bench.kills} runs, {killed} of them killed before their end, all equal"


def _learnt(whole: float, seconds: float | None) -> float:
    """Of what the last one took, or, where it was killed, a little more than was thought."""
    return 1.2 * whole if seconds is None else seconds


def _state(updates: int, size: int) -> checkpoint.Checkpoint:
    weights = {"a": torch.full((size,), float(updates)), "b": torch.full((size,), 0.5)}
    return checkpoint.Checkpoint(updates, updates * 8, weights, {"a/exp_avg": weights["a"] * 2})


def _save_in_child(folder: Path, size: int, before: Callable[[], None] = lambda: None) -> int:
    """Saves checkpoints 2 and 3 in a process of its own, which is returned; the first goes."""

    def save() -> None:
        for updates in (2, 3):
            checkpoint.save(folder, _state(updates, size), keep=2)

    return _in_child(save, before=before)


def _expect_loadable(folder: Path, size: int) -> None:
    newest = checkpoint.newest_sound(folder)
    expect(newest.path is not None, "no checkpoint is left")
    expect(not newest.passed_over, f"a damaged one is left: {newest.passed_over}")
    assert newest.path is not None
    found, made = checkpoint.load(newest.path), _state(checkpoint.updates_of(newest.path), size)
    same = all(torch.equal(found.weights[n], made.weights[n]) for n in made.weights)
    expect(same and found.position == made.position, f"{newest.path.name} holds something else")
    checkpoint.save(folder, _state(9, size), keep=2)  # what was left does not stand in the way
    expect(checkpoint.newest_sound(folder).path == folder / "step-00000009", "saving fails after")
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    expect(not left, f"rests stay: {left}")


def _fresh(bench: Bench, size: int) -> Path:
    folder = bench.new_folder("saving")
    checkpoint.save(folder, _state(1, size), keep=2)
    return folder


def in_saving(bench: Bench) -> str:
    """What a saving takes is learnt on the way, as in training."""
    whole, killed = 1.0, 0  # seconds
    for _ in range(bench.save_kills):
        folder = _fresh(bench, _LARGE)
        seconds = _kill_after(bench.draw.uniform(0, whole), _save_in_child(folder, _LARGE))
        killed += seconds is None
        whole = _learnt(whole, seconds)
        _expect_loadable(folder, _LARGE)
        shutil.rmtree(folder)
    return f"{bench.save_kills} times, {killed} before the end, all loadable"


def _kill_after(seconds: float, pid: int) -> float | None:
    """kill -9; what the process took if it ended before."""
    started = time.perf_counter()
    while (now := time.perf_counter() - started) < seconds:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return now
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def after_every_call(bench: Bench) -> str:
    """Python tells of every call that touches the disk before it is made; die at the n-th one."""
    number = 0
    while True:
        folder = _fresh(bench, _SMALL)
        pid = _save_in_child(folder, _SMALL, partial(_die_at, number, folder))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _expect_loadable(folder, _SMALL)
        shutil.rmtree(folder)
        if code == 0:
            return f"at each of {number} calls, all loadable"
        expect(code == -signal.SIGKILL, f"saving ended with code {code}")
        number += 1


def in_start(bench: Bench) -> str:
    """At every call that touches a run's folder before there is anything in it to go on with."""
    number = 0
    while True:
        run = RunFolder(bench.new_folder("start"), None, False)
        config = load_config(configs_folder() / "default.yaml", [f"output.dir={run.path}"])
        pid = _in_child(partial(_begin, run, config), before=partial(_die_at, number, run.path))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        expect(choose_run_folder(config) == run, "the same command takes another folder")
        _begin(run, config)
        left = sorted(path.name for path in run.path.iterdir())
        expect(left == [".lock", "config.yaml", "run.json"], f"in the folder are {left}")
        shutil.rmtree(run.path)
        if code == 0:
            return f"at each of {number} calls, all begun again"
        expect(code == -signal.SIGKILL, f"the start ended with code {code}")
        number += 1


def _begin(run: RunFolder, config: Config) -> None:
    held = lock(run)
    write_start(run, config, facts={"a": 1})
    held.close()


def _in_child(work: Callable[[], object], *, before: Callable[[], None]) -> int:
    """A process of its own, which is returned."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        before()
        work()
        code = 0
    finally:
        os._exit(code)


def _die_at(number: int, folder: Path) -> None:
    left = number

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event not in _CALLS or not any(str(folder) in str(word) for word in arguments):
            return
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    sys.addaudithook(hook)


_EQUAL = "the same command continues to a run equal bit for bit"
DRILLS = [
    Drill("kill -9 in training", _EQUAL, in_training),
    Drill("kill -9 at every call of a start", "the same command begins again", in_start),
    Drill("kill -9 in saving", "the newest checkpoint is whole", in_saving),
    Drill("kill -9 at every call of saving", "the newest checkpoint is whole", after_every_call),
]
