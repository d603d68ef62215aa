"""Jobs in processes of their own: how they end, and what is left of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ROOT

from mimkit.ablation.machine import machine_slots
from mimkit.ablation.processes import Ended, Job, process_context, start
from mimkit.ablation.spent import read_spent
from mimkit.errors import UserError


def _fine(value: str) -> None:
    print(value, os.environ["SLOT"], flush=True)


def _refuses(value: str) -> None:
    raise UserError(f"{value} is no good")


def _breaks(value: str) -> None:
    raise RuntimeError(value)


def _is_killed(value: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lived(action: object, folder: Path) -> Ended:
    job = Job(action, {"value": "this"}, folder / "logs" / "x.log", folder / "x.json")  # type: ignore[arg-type]
    return start(job, process_context(cuda=False, engine="local"), {"SLOT": "3"}).wait()


def test_a_job_has_its_environment_and_log_and_says_what_it_took(tmp_path: Path) -> None:
    ended = _lived(_fine, tmp_path)
    error, spent = read_spent(tmp_path / "x.json")
    assert ended.error is None and error is None
    assert spent.memory_mib > 1 and 0 < spent.wall <= ended.wall
    assert (tmp_path / "logs" / "x.log").read_text() == "this 3\n"


def test_errors_of_all_kinds_come_back_as_a_line(tmp_path: Path) -> None:
    assert _lived(_refuses, tmp_path).error == "this is no good"
    assert _lived(_breaks, tmp_path).error == "RuntimeError: this"
    assert "Traceback" in (tmp_path / "logs" / "x.log").read_text()
    killed = _lived(_is_killed, tmp_path).error
    assert killed is not None and "SIGKILL" in killed and "x.log" in killed


def test_attempts_at_a_job_add_up_also_one_that_was_killed(tmp_path: Path) -> None:
    """Of that one its seconds are known, and that the rest is not."""
    walls, spent = [], []
    for action in (_fine, _is_killed, _fine):
        walls.append(_lived(action, tmp_path).wall)
        spent.append(read_spent(tmp_path / "x.json")[1])
    assert [(one.attempts, one.unmeasured) for one in spent] == [(1, 0), (2, 1), (3, 1)]
    assert spent[1].wall == pytest.approx(spent[0].wall + walls[1])
    assert spent[1].process == spent[0].process < spent[2].process
    assert spent[0].wall + walls[1] < spent[2].wall <= sum(walls)


def test_slots_divide_the_cores_and_no_more_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    cores = len(os.sched_getaffinity(0))
    [one] = machine_slots(jobs=1, ranks=1, visible=None)
    assert (one.threads, one.environment) == (cores, {})
    with pytest.raises(UserError, match=f"needs {2 * cores} cores"):
        machine_slots(jobs=cores, ranks=2, visible=None)


def test_slots_divide_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    slots = machine_slots(jobs=2, ranks=2, visible="1,3,5,7")
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["1,3", "5,7"]
    with pytest.raises(UserError, match="needs 6 GPUs, and 4 are visible"):
        machine_slots(jobs=3, ranks=2, visible=None)


STUDY = """
import sys, runpy
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from mimkit.ablation import processes
processes._PRELOADED[:] = ["mimkit.errors"]  # the others take ten seconds
job = processes.Job(runpy.run_path, {"path_name": "job.py"}, Path("log"), Path("result.json"))
context = processes.process_context(cuda=False, engine="local")
processes.start(job, context, {}).wait()
"""
JOB = """
import os, subprocess, sys, mimkit
from mimkit.ablation.processes import end_with_this_process
print(mimkit.__file__, os.getpid(), flush=True)
say = "import mimkit, os, time; print(mimkit.__file__, os.getpid(), flush=True); time.sleep(99)"
subprocess.run([sys.executable, "-c", say], preexec_fn=end_with_this_process)
"""


def _is_gone(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def _wait(until: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_jobs_run_the_code_of_their_study_and_end_with_it(tmp_path: Path) -> None:
    """Killed with a signal that it cannot answer; another mimkit lies in the working folder."""
    (tmp_path / "mimkit").mkdir()
    (tmp_path / "mimkit" / "__init__.py").touch()
    (tmp_path / "job.py").write_text(JOB)
    study = subprocess.Popen([sys.executable, "-c", STUDY, str(ROOT)], cwd=tmp_path)
    log = tmp_path / "log"
    try:
        _wait(lambda: log.exists() and log.read_text().count("\n") == 2)
    finally:
        study.kill()
        study.wait()
    (first, job), (second, launched) = map(str.split, log.read_text().splitlines())
    assert first == second == str(ROOT / "mimkit" / "__init__.py")
    _wait(lambda: _is_gone(int(job)) and _is_gone(int(launched)))
    error, spent = read_spent(tmp_path / "result.json")
    assert error == "the study ended before it" and (spent.attempts, spent.unmeasured) == (1, 0)
