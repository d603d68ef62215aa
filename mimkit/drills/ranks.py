"""One of two ranks goes wrong."""

import json
import math
import signal
import time
from functools import partial
from typing import Any

from mimkit.drills import Drill
from mimkit.drills._runs import (
    PATIENCE,
    STEPS,
    Bench,
    Break,
    Process,
    change_step,
    expect,
    expect_close,
    linger,
    wait_for_update,
)
from mimkit.train import checkpoint

_LIMIT = 30  # seconds
_BAD, _SAVED = 8, 6  # the update that goes wrong, and the last checkpoint before it


def _nan(result: Any) -> Any:
    return result._replace(loss=result.loss * math.nan)


def _raise(_: Any) -> Any:
    raise RuntimeError("a fault of the drill")


def _expect_one_report(ranks: list[Process], words: str, *, code: int | None = 2) -> None:
    started = time.monotonic()
    ranks[0].wait(_LIMIT)
    seconds = time.monotonic() - started
    for rank in ranks[1:]:
        rank.wait(max(1.0, _LIMIT - seconds))
    said = [rank.said() for rank in ranks]
    if code is not None:
        codes = [rank.code for rank in ranks]
        expect(codes[0] == code, f"the ranks ended with codes {codes}: {said[0][-500:]}")
    reports = sum(text.count(words) for text in said)
    expect(reports == 1, f"{reports} reports of '{words}': {said[0][-500:]} | {said[1][-500:]}")


def nan_stops(bench: Bench) -> str:
    run = bench.new_folder("nan-stop")
    breaks: list[Break] = [lambda: None, partial(change_step, _nan, update=_BAD)]
    ranks = bench.start(run, ranks=2, breaks=breaks)
    wait_for_update(ranks, run, _SAVED)
    _expect_one_report(ranks, f"not finite at update {_BAD}: grad_norm")
    newest = checkpoint.newest_sound(run / "checkpoints").path
    expect(newest is not None and newest.name == f"step-{_SAVED:08d}", f"it saved {newest}")
    bench.finish(run)
    expect_close(run, bench.undisturbed)
    return "all ended within 30 s with one report; the checkpoint before it continues"


def nan_is_survived(bench: Bench) -> str:
    """By skipping the batch, and by going back and skipping it."""
    for policy in ("skip", "rollback"):
        run = bench.new_folder(f"nan-{policy}")
        words = [f"train.on_nonfinite={policy}", "engine.zero_stage=2"]
        breaks: list[Break] = [lambda: None, partial(change_step, _nan, update=_BAD)]
        ranks = bench.start(run, words, ranks=2, breaks=breaks)
        codes = [rank.wait(PATIENCE) for rank in ranks]
        expect(codes == [0, 0], f"{policy}: codes {codes}: {ranks[0].said()[-500:]}")
        summary = json.loads((run / "summary.json").read_text())
        expect(summary["nonfinite_updates"] == 1, f"{policy}: it counts {summary}")
        last = checkpoint.load(run / "checkpoints" / f"step-{STEPS:08d}")
        finite = all(value.isfinite().all() for value in last.weights.values())
        expect(finite, f"{policy}: weights are not finite")
        ahead = last.position - STEPS * 8
        lost = 0 if policy == "skip" else (_BAD - _SAVED) * 8
        expect(ahead == lost, f"{policy}: {ahead} samples ahead")
        applied = STEPS - 1 if policy == "skip" else STEPS
        expect(last.applied == applied, f"{policy}: {last.applied} updates were made")
    return "train.on_nonfinite=skip and rollback finish, count one, and stay finite"


def raising(bench: Bench) -> str:
    run = bench.new_folder("raising")
    breaks: list[Break] = [lambda: None, partial(change_step, _raise, update=_BAD)]
    ranks = bench.start(run, ranks=2, breaks=breaks)
    wait_for_update(ranks, run, _SAVED)
    _expect_one_report(ranks, "another rank ended before this one")
    expect("a fault of the drill" in ranks[1].said(), "rank 1 does not say what happened")
    return "rank 0 ended within 30 s and points to the other"


def lost(bench: Bench) -> str:
    run = bench.new_folder("lost")
    ranks = bench.start(run, ranks=2, breaks=[partial(change_step, linger)] * 2)
    wait_for_update(ranks, run, 4)
    ranks[1].send(signal.SIGKILL)
    _expect_one_report(ranks, "another rank ended before this one")
    bench.finish(run)
    expect_close(run, bench.undisturbed)
    return "rank 0 ended within 30 s with one report; one process went on"


def hanging(bench: Bench) -> str:
    """`engine.timeout` is for the start too, where rank 0 works alone for a while and ranks come
    from their imports at different times: it must be long for this machine as it is now."""
    run, seconds = bench.new_folder("hanging"), max(30.0, 3 * bench.seconds)
    words, linger_too = [f"engine.timeout={seconds / 60}"], [partial(change_step, linger)] * 2
    ranks = bench.start(run, words, ranks=2, breaks=linger_too)
    wait_for_update(ranks, run, 4)
    ranks[1].send(signal.SIGSTOP)
    started = time.monotonic()
    try:
        code = ranks[0].wait(2 * seconds + _LIMIT)
    finally:
        ranks[1].send(signal.SIGKILL)
        ranks[1].wait(10)
    waited, said = time.monotonic() - started, ranks[0].said()
    expect(code == 2 and "did not answer within engine.timeout" in said, f"{code}: {said[-500:]}")
    return f"engine.timeout of {seconds:.0f} s ended rank 0 after {waited:.0f} s"


_ENDS = "all ranks end within 30 s, with one report"
DRILLS = [
    Drill("NaN on one rank", _ENDS, nan_stops),
    Drill("NaN, and going on", "skip and rollback finish and are counted", nan_is_survived, False),
    Drill("a rank raises", _ENDS, raising, short=False),
    Drill("a rank is lost (kill -9)", _ENDS, lost),
    Drill("a rank hangs (SIGSTOP)", "the others end after engine.timeout", hanging, short=False),
]
