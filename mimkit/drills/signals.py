"""Signals that ask a run to stop."""

import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from mimkit.drills import Drill
from mimkit.drills._runs import (
    PATIENCE,
    STEPS,
    Bench,
    change_step,
    expect,
    expect_close,
    expect_equal,
    linger,
    updates_done,
    wait_for_update,
)
from mimkit.train import checkpoint


def _stopped(bench: Bench, run: Path, number: signal.Signals, code: int) -> None:
    """Starts the run or goes on with it, and stops it some updates later."""
    before = updates_done(run)
    process = bench.start(run, breaks=[partial(change_step, linger)])[0]
    wait_for_update([process], run, before + 1)
    process.send(number)
    ended = process.wait(PATIENCE)
    expect(ended == code, f"{number.name} ended it with code {ended}: {process.said()[-400:]}")
    newest = checkpoint.newest_sound(run / "checkpoints").path
    expect(newest is not None, f"{number.name}: nothing was saved")
    said = f"stopped by {number.name}: saved after update "
    expect(said in process.said(), f"it does not say how it ended: {process.said()[-400:]}")
    expect("Traceback" not in process.said(), f"it says too much: {process.said()[-600:]}")


def asked(bench: Bench) -> str:
    """One run, stopped by each in turn."""
    run = bench.new_folder("asked")
    for number, code in ((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)):
        _stopped(bench, run, number, code)
    bench.finish(run)
    expect_equal(run, bench.undisturbed)
    return "SIGTERM and SIGUSR1 end with code 75, Ctrl-C with 130"


def twice(bench: Bench) -> str:
    """While an update takes long: the second one does not wait for it."""
    run = bench.new_folder("twice")
    process = bench.start(run, breaks=[partial(change_step, _slow)])[0]
    wait_for_update([process], run, 1)
    started = time.monotonic()
    for _ in range(2):
        process.send(signal.SIGINT)
        time.sleep(0.2)
    code = process.wait(10)
    seconds = time.monotonic() - started
    expect(code == 130 and seconds < 5, f"it ended with code {code} after {seconds:.1f} s")
    bench.finish(run)
    expect_equal(run, bench.undisturbed)
    return f"left after {seconds:.1f} s"


def _slow(result: Any) -> Any:
    time.sleep(3)
    return result


def one_of_two(bench: Bench) -> str:
    """Only rank 1 is told; both stop after the same update, and one process goes on."""
    run = bench.new_folder("two-stopped")
    ranks = bench.start(run, ranks=2, breaks=[partial(change_step, linger)] * 2)
    wait_for_update(ranks, run, 1)
    ranks[1].send(signal.SIGTERM)
    codes = [rank.wait(PATIENCE) for rank in ranks]
    expect(codes == [75, 75], f"the ranks ended with codes {codes}: {ranks[0].said()[-400:]}")
    reports = sum(rank.said().count("stopped by SIGTERM") for rank in ranks)
    expect(reports == 1, f"{reports} ranks say so")
    newest = checkpoint.newest_sound(run / "checkpoints").path
    expect(newest is not None and checkpoint.updates_of(newest) < STEPS, "it was not stopped")
    bench.finish(run)
    expect_close(run, bench.undisturbed)
    return "both ended with code 75; one process went on"


_EQUAL = "saves, leaves; going on equals the undisturbed run"
DRILLS = [
    Drill("SIGTERM, SIGUSR1, Ctrl-C", _EQUAL, asked),
    Drill("Ctrl-C twice", "leaves at once; going on equals", twice, short=False),
    Drill("SIGTERM to one of two ranks", "both save and leave, with one report", one_of_two),
]
