"""A study that is asked to stop: its runs save and leave, no other starts, and it says so."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
from commands import ROOT, pretrain

from mimkit.ablation import pool
from mimkit.ablation.machine import Slot
from mimkit.ablation.pool import Pool
from mimkit.ablation.processes import Ended, Job, process_context
from mimkit.ablation.spent import read_spent
from mimkit.cli import main
from mimkit.errors import Interrupted
from mimkit.interrupts import StopRequests, exit_code

SLOTS = [Slot(number, (), 1, 1) for number in range(2)]
GIVEN = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """A shell starts what it puts into the background without SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _wait(until: Callable[[], object], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def _trains(folder: Path, name: str) -> None:
    """As a training does: the request is noted, the update made, a checkpoint written."""
    with StopRequests() as stop:
        (folder / f"{name}.begun").touch()
        _wait(stop.asked)
        (folder / f"{name}.saved").touch()
        raise Interrupted(stop.signal or "", "saved after update 3")


def _hears_nothing(folder: Path, name: str) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    (folder / f"{name}.begun").touch()
    time.sleep(90)


def _stopped(folder: Path, number: signal.Signals, action: Callable[[Path, str], None]
             ) -> tuple[Interrupted, list[str]]:  # fmt: skip
    """A pool whose process gets the signal when both of its slots are at work."""
    context, said = process_context(cuda=False, engine="local"), list[str]()

    def send() -> None:
        _wait(lambda: len(list(folder.glob("*.begun"))) == len(SLOTS))
        os.kill(forkserver._forkserver._forkserver_pid, number)  # type: ignore[attr-defined]
        os.kill(os.getpid(), number)

    def job(name: str) -> Job:
        given = {"folder": folder, "name": name}
        return Job(action, given, folder / f"{name}.log", folder / f"{name}.json")

    def live(name: str) -> Ended:
        return jobs.live(lambda slot: job(name))

    sender = threading.Thread(target=send)
    sender.start()
    jobs = Pool(SLOTS, context, say=said.append, describe=lambda: "0 of 3 are done")
    with pytest.raises(Interrupted) as caught, jobs:
        jobs.map(live, GIVEN)
    sender.join()
    return caught.value, said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_jobs_save_and_leave_and_no_other_starts(number: signal.Signals, tmp_path: Path) -> None:
    """Also where the server that forks them got the signal too."""
    interruption, said = _stopped(tmp_path, number, _trains)
    assert (interruption.signal, interruption.done) == (number.name, "0 of 3 are done")
    assert sorted(path.name for path in tmp_path.glob("*.saved")) == ["a.saved", "b.saved"]
    for name in "ab":
        error, spent = read_spent(tmp_path / f"{name}.json")
        assert error == "stopped by SIGTERM: saved after update 3"
        assert (spent.attempts, spent.unmeasured) == (1, 0) and spent.process > 0
    assert list(tmp_path.glob("c.*")) == []
    assert said[0].startswith("no run starts any more; those at work (2) save and leave")


def test_a_job_that_does_not_leave_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "GRACE", 1.0)
    interruption, _ = _stopped(tmp_path, signal.SIGTERM, _hears_nothing)
    assert interruption.done == "0 of 3 are done; 2 had to be killed after 1 s"
    for name in "ab":
        error, spent = read_spent(tmp_path / f"{name}.json")
        assert error is not None and "SIGKILL" in error
        assert (spent.attempts, spent.unmeasured) == (1, 1) and spent.wall >= 1


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_copy_is_refused_and_looking_is_not(
    tiny_study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ablate_stems", "--config", str(tiny_study), f"folder={tmp_path}/s", "seeds=[0]"]
    (tmp_path / "s").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "s" / ".lock")],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert main(words) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"another process runs a study in {tmp_path}/s; wait for it" in said
        assert not (tmp_path / "s" / "study.yaml").exists()
        assert main([*words, "--dry-run"]) == 0
        holder.kill()


def test_a_study_that_is_refused_leaves_no_folder(tiny_study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "above" / "s"
    words = ["ablate_stems", "--config", str(tiny_study), f"folder={folder}"]
    assert main([*words, "arms.two_blocks.declares=[]"]) == 2
    assert list(tmp_path.iterdir()) == []


class _Study:
    """The command in a process of its own, two runs at a time, long enough to be stopped."""

    def __init__(self, config: Path, folder: Path) -> None:
        self.folder = folder
        self.words = ["--config", str(config), f"folder={folder}", "arms.two_blocks=null",
                      "control=null", "seeds=[0]", "settings.train.steps=300",
                      *(f"settings.output.{key}_every=1000" for key in (
                          "checkpoint", "evaluate", "picture"))]  # fmt: skip
        command = [sys.executable, str(ROOT / "tools" / "ablate_stems.py"), *self.words]
        self.process = subprocess.Popen(
            [*command, "--jobs", "2"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def stop(self, *numbers: signal.Signals, held: bool = False) -> tuple[int, str]:
        """When both runs train; the exit code and what was said.

        Args:
            held: its runs stand still meanwhile, and cannot have left before the last signal.
        """

        def both_train() -> bool:
            assert self.process.poll() is None, self.process.stdout
            lines = [path.read_text() for path in self.folder.glob("runs/*-seed*/metrics.jsonl")]
            return sum('"loss"' in text for text in lines) == 2

        _wait(both_train)
        runs = psutil.Process(self.process.pid).children(recursive=True) if held else []
        for run in runs:
            run.suspend()
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(0.1)
        signalled = time.monotonic()
        if held:
            self.process.wait(timeout=60)
        self.seconds = time.monotonic() - signalled
        for run in runs:
            with contextlib.suppress(psutil.NoSuchProcess):
                run.resume()
        said, _ = self.process.communicate(timeout=60)
        assert not psutil.wait_procs(runs, timeout=30)[1], "a run goes on without its study"
        return self.process.returncode, " ".join(said.split())


def _losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two runs at a time need two cores")
def test_a_study_stopped_by_sigterm_goes_on_to_the_numbers_of_one_that_was_not(
    tiny_study: Path, tmp_path: Path
) -> None:
    study = _Study(tiny_study, tmp_path / "s")
    code, said = study.stop(signal.SIGTERM, signal.SIGUSR1)
    assert code == exit_code("SIGTERM")
    assert (
        "stopped by SIGTERM: 0 of the 2 jobs that were left are done; the same command goes on"
        in said
    )
    saved = re.findall(r"stopped by SIGTERM: saved after update (\d+) of 300", said)
    assert len(saved) == 2 and all(0 < int(updates) < 300 for updates in saved)
    assert main(["ablate_stems", *study.words]) == 0
    for run in (tmp_path / "s" / "runs").glob("*-seed0-*"):
        alone = tmp_path / run.name
        words = ["--config", str(run / "config.yaml"), f"output.dir={alone}"]
        assert pretrain([*words, "engine.token_bank=null"]) == 0
        assert _losses(run) == _losses(alone)
        job = tmp_path / "s" / "jobs" / f"{run.name.rpartition('-')[2]}.json"
        assert read_spent(job)[1].attempts == 2


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two runs at a time need two cores")
def test_ctrl_c_stops_a_study_and_twice_at_once(tiny_study: Path, tmp_path: Path) -> None:
    code, said = _Study(tiny_study, tmp_path / "once").stop(signal.SIGINT)
    assert code == 130 and "Ctrl-C again leaves at once" in said
    assert said.count("saved after update") == 2
    study = _Study(tiny_study, tmp_path / "twice")
    code, said = study.stop(signal.SIGINT, signal.SIGINT, held=True)
    assert code == 130 and study.seconds < 10 and "jobs that were left are done" not in said
