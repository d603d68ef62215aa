"""Signals are noted or raised where that is asked for, and nowhere else."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from mimkit.errors import Interrupted
from mimkit.interrupts import StopRequests, exit_code, ignore_signals, interruptible

ASKING = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """A shell starts what it puts into the background without SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", ASKING)
def test_a_request_is_noted_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in ASKING]
    with StopRequests() as stop:
        assert not stop.asked()
        _send(number)
        assert stop.asked() and stop.signal == number.name
    assert [signal.getsignal(n) for n in ASKING] == before


def test_only_the_first_signal_counts() -> None:
    """A launcher passes SIGTERM on after the terminal's Ctrl-C; and twice is no Ctrl-C twice."""
    with StopRequests() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            _send(number)
        assert stop.signal == "SIGTERM"


def test_an_error_after_a_request_is_no_failure() -> None:
    with pytest.raises(RuntimeError, match="lost"), StopRequests() as stop, stop.explaining():
        raise RuntimeError("connection lost")
    nothing = pytest.raises(Interrupted, match=r"SIGTERM: nothing was saved \(connection lost\)")
    with nothing, StopRequests() as stop, stop.explaining():
        _send(signal.SIGTERM)
        raise RuntimeError("connection lost\nand more")


def test_elsewhere_they_are_raised() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        with pytest.raises(Interrupted, match=number.name) as caught, interruptible():
            _send(number)
        assert caught.value.signal == number.name
    with pytest.raises(KeyboardInterrupt), interruptible():
        _send(signal.SIGINT)


def test_exit_codes_say_whether_to_start_again() -> None:
    assert [exit_code(n.name) for n in ASKING] == [75, 75, 130]


TWICE = """
import os, signal, time
from mimkit.interrupts import StopRequests
with StopRequests() as stop:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


def test_a_second_ctrl_c_ends_the_process_at_once() -> None:
    started = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", TWICE], check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (130, b"")
    assert time.monotonic() - started < 30


def _worker(pipe: Connection) -> None:
    ignore_signals()
    pipe.send("ready")
    pipe.send(pipe.recv())


def test_a_worker_leaves_signals_to_its_parent() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_worker, args=(theirs,))
    process.start()
    assert ours.recv() == "ready"
    for number in ASKING:
        os.kill(process.pid or 0, number)
    ours.send("still there")
    assert ours.recv() == "still there"
    process.join()
    assert process.exitcode == 0


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "deepspeed.launcher.launch"])
print(child.pid, flush=True)
"""
CHILD = """
import subprocess, sys
code = '''
import sys, time
from mimkit.interrupts import StopRequests
stop = StopRequests()
print("asked" if stop.asked() else "not yet", flush=True)
sys.stdin.readline()
limit = time.monotonic() + 30
while not stop.asked() and time.monotonic() < limit:
    time.sleep(0.05)
print("asked" if stop.asked() else "never", stop.signal, flush=True)
'''
subprocess.run([sys.executable, "-c", code])
"""


def test_a_launcher_that_was_ended_counts_as_sigterm() -> None:
    """`deepspeed` is two processes above a rank; a signal ends the upper one without a word."""
    upper = subprocess.Popen(
        [sys.executable, "-c", PARENT + "child.wait()", CHILD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert upper.stdout is not None and upper.stdin is not None
    try:
        assert upper.stdout.readline().strip().isdecimal()
        assert upper.stdout.readline().strip() == "not yet"
        upper.kill()
        upper.wait()
        upper.stdin.write("\n")
        upper.stdin.flush()
        assert upper.stdout.readline().strip() == "asked SIGTERM"
    finally:
        upper.stdin.close()
        upper.stdout.close()
