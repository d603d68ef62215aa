"""Damaged files, a full disk, clocks that jump."""

import os
import resource
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from mimkit.drills import Drill
from mimkit.drills._runs import (
    PATIENCE,
    SAVED_EVERY,
    STEPS,
    Bench,
    change_step,
    expect,
    expect_equal,
    linger,
)

_LIMIT = 1 << 20  # bytes of a file: less than a checkpoint's
_SMALL = 20  # MiB of a disk: one checkpoint fits, three do not
_DAMAGES = {"model.safetensors": "flip", "state.json": "cut", "optimizer.safetensors": "remove"}
_LEFT = STEPS - len(_DAMAGES) * SAVED_EVERY  # the update of the only sound checkpoint


def damaged(bench: Bench) -> str:
    """A flipped byte, a file that was cut, one that is missing, in the newest ones."""
    run = bench.half_done("damaged")
    folders = sorted((run / "checkpoints").iterdir(), reverse=True)[: len(_DAMAGES)]
    for folder, (name, how) in zip(folders, _DAMAGES.items(), strict=True):
        _damage(folder / name, how)
    said = bench.finish(run)
    expect(f"step-{_LEFT:08d}: update {_LEFT} of" in said, f"it took another: {said[:600]}")
    reasons = said.split("passed over: ")[1:]
    expect(len(reasons) == len(_DAMAGES), f"{len(reasons)} were passed over: {said[:1500]}")
    for reason, folder, name in zip(reasons, folders, _DAMAGES, strict=True):
        expect(folder.name in reason and name in reason, f"not a word of {name}: {reason[:300]}")
    expect_equal(run, bench.undisturbed)
    return ", ".join(f"{how} {name}" for name, how in _DAMAGES.items())


def all_damaged(bench: Bench) -> str:
    run = bench.half_done("all-damaged")
    for folder in (run / "checkpoints").iterdir():
        _damage(folder / "model.safetensors", "flip")
    process = bench.start(run)[0]
    code = process.wait(PATIENCE)
    said = process.said()
    expect(code == 2 and "every checkpoint in" in said, f"code {code}: {said[-500:]}")
    return "refused with code 2"


def _damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
        return
    data[len(data) // 2] ^= 1
    path.write_bytes(data if how == "flip" else data[: len(data) // 2])


def full(bench: Bench) -> str:
    """Files cannot grow; and, where this process may mount one, a disk of 20 MiB."""
    disk = bench.new_folder("disk")
    disk.mkdir()
    mounted = not os.geteuid() and _mounts(f"size={_SMALL}m", disk)
    run = disk / "run"
    try:
        if mounted:
            _is_refused(bench, run)
            expect(_mounts(f"remount,size={5 * _SMALL}m", disk), "no larger disk")
        process = bench.start(run, breaks=[_limit_files])[0]
        code, said = process.wait(PATIENCE), process.said()
        expect(code == 2 and "cannot write" in said, f"code {code}: {said[-500:]}")
        if mounted:
            _fills(bench, run)
        bench.finish(run)
        expect_equal(run, bench.undisturbed)
    finally:
        if mounted:  # lazily: a loader process that is still leaving keeps it busy for a moment
            subprocess.run(["umount", "--lazy", str(disk)], check=False)
    return "a limit of file sizes" + (" and a small disk" if mounted else "")


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LIMIT, resource.RLIM_INFINITY))


def _is_refused(bench: Bench, run: Path) -> None:
    """In seconds, by the space that will be needed."""
    process = bench.start(run)[0]
    code, said = process.wait(PATIENCE), process.said()
    expect(code == 2 and "MiB are free in" in said, f"code {code}: {said[-500:]}")
    expect(not (run / "metrics.jsonl").exists(), "it trained first")


def _fills(bench: Bench, run: Path) -> None:
    """The run fits at the start, and no more in the middle."""
    filler = run.parent / "filler"
    process = bench.start(run, breaks=[partial(change_step, linger)])[0]
    _fill_when_saved(run, filler)
    code, said = process.wait(PATIENCE), process.said()
    expect(code == 2 and "MiB are free" in said, f"code {code}: {said[-500:]}")
    filler.unlink()


def _mounts(options: str, folder: Path) -> bool:
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _fill_when_saved(run: Path, filler: Path) -> None:
    """All but 1 MiB, as soon as there is a checkpoint."""
    limit = time.monotonic() + PATIENCE
    while not list(run.glob("checkpoints/step-*")) and time.monotonic() < limit:
        time.sleep(0.002)
    free = os.statvfs(run).f_bavail * os.statvfs(run).f_frsize
    with suppress(OSError):  # the run wrote meanwhile, and it is full already
        filler.write_bytes(b"x" * max(free - (1 << 20), 0))


def clock(bench: Bench) -> str:
    """Files from tomorrow and from long ago, and a clock that went back a day meanwhile."""
    run = bench.without_last("clock")
    for number, path in enumerate(sorted(run.rglob("*"))):
        when = time.time() + (86_400 if number % 2 else -(10**9))
        os.utime(path, (when, when), follow_symlinks=False)
    process = bench.start(run, breaks=[_clock_goes_back])[0]
    code, newest = process.wait(PATIENCE), STEPS - SAVED_EVERY
    expect(code == 0, f"code {code}: {process.said()[-500:]}")
    said = f"step-{newest:08d}: update {newest} of"
    expect(said in process.said(), "it did not take the newest checkpoint")
    expect_equal(run, bench.undisturbed)
    return "files and clock moved by days"


def _clock_goes_back() -> None:
    now = time.time
    time.time = lambda: now() - 86_400


_OTHER = "the checkpoint before it is taken, and said why; equal"
DRILLS = [
    Drill("a damaged checkpoint", _OTHER, damaged),
    Drill("all checkpoints damaged", "an error that names them", all_damaged),
    Drill("a full disk", "an error with numbers; goes on when there is space", full),
    Drill("clock and file times jump", "nothing depends on them", clock),
]
