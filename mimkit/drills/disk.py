"""Damaged files, a full disk, clocks that jump."""

import os
import resource
import subprocess
import time
from pathlib import Path

from mimkit.drills import Drill
from mimkit.drills._runs import PATIENCE, STEPS, Bench, expect, expect_equal

_LIMIT = 1 << 20  # bytes of a file: less than a checkpoint's
_SMALL = 20  # MiB of a disk: one checkpoint fits, three do not
_DAMAGES = {"model.safetensors": "flip", "state.json": "cut", "optimizer.safetensors": "remove"}


def damaged(bench: Bench) -> str:
    """A flipped byte, a file that was cut, one that is missing, in the newest checkpoint."""
    for name, how in _DAMAGES.items():
        run = bench.half_done(f"damaged-{how}")
        _damage(_newest(run) / name, how)
        said = bench.finish(run)
        expect("step-00000008: update 8 of" in said, f"{name}, {how}: {said[:600]}")
        expect("passed over: " in said and name in said, f"{name}, {how}: not a word of it")
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


def _newest(run: Path) -> Path:
    return run / "checkpoints" / f"step-{STEPS:08d}"


def _damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
        return
    data[len(data) // 2] ^= 1
    path.write_bytes(data if how == "flip" else data[: len(data) // 2])


def full(bench: Bench) -> str:
    """Files cannot grow; and, where this process may mount one, a disk of 20 MiB."""
    run = bench.new_folder("full")
    process = bench.start(run, breaks=[_limit_files])[0]
    code = process.wait(PATIENCE)
    said = process.said()
    expect(code == 2 and "cannot write" in said, f"code {code}: {said[-500:]}")
    bench.finish(run)
    expect_equal(run, bench.undisturbed)
    return "a limit of file sizes" + (" and a small disk" if _small_disk(bench) else "")


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LIMIT, resource.RLIM_INFINITY))


def _small_disk(bench: Bench) -> bool:
    """Refused in seconds by the space that will be needed; goes on when there is more."""
    disk = bench.new_folder("disk")
    disk.mkdir()
    if os.geteuid() or not _mounts(f"size={_SMALL}m", disk):
        return False
    try:
        process = bench.start(disk / "run")[0]
        code = process.wait(PATIENCE)
        said = process.said()
        expect(code == 2 and "MiB are free in" in said, f"code {code}: {said[-500:]}")
        expect(not (disk / "run" / "metrics.jsonl").exists(), "it trained first")
        filler = disk / "filler"  # it fits at the start, and no more in the middle
        expect(_mounts(f"remount,size={5 * _SMALL}m", disk), "no larger disk")
        process = bench.start(disk / "run")[0]
        _fill_when_saved(disk, filler)
        code, said = process.wait(PATIENCE), process.said()
        expect(code == 2 and "MiB are free" in said + "MiB free there", f"code {code}: {said}")
        filler.unlink()
        bench.finish(disk / "run")
        expect_equal(disk / "run", bench.undisturbed)
    finally:
        # lazily: a loader process that is still leaving keeps it busy for a moment
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
    return True


def _mounts(options: str, folder: Path) -> bool:
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _fill_when_saved(disk: Path, filler: Path) -> None:
    """All but 1 MiB, as soon as there is a checkpoint."""
    limit = time.monotonic() + PATIENCE
    while not list(disk.glob("run/checkpoints/step-*")) and time.monotonic() < limit:
        time.sleep(0.002)
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(b"x" * max(free - (1 << 20), 0))


def clock(bench: Bench) -> str:
    """Files from tomorrow and from long ago, and a clock that went back a day meanwhile."""
    run = bench.without_last("clock")
    for number, path in enumerate(sorted(run.rglob("*"))):
        when = time.time() + (86_400 if number % 2 else -(10**9))
        os.utime(path, (when, when), follow_symlinks=False)
    process = bench.start(run, breaks=[_clock_goes_back])[0]
    code = process.wait(PATIENCE)
    expect(code == 0, f"code {code}: {process.said()[-500:]}")
    expect("step-00000008: update 8 of" in process.said(), "it did not take the newest checkpoint")
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
