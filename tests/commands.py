"""Commands as a user gives them, and the shards of `conftest.shards`."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from mimkit.cli import main

ROOT = Path(__file__).resolve().parents[1]
_VARIABLES_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE",
                       "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


@dataclass(frozen=True)
class Shards:
    """Two folders of labelled 48-pixel crops: 96 to train on in three tars, 24 held out in one."""

    train: Path
    heldout: Path


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str
    seconds: float


def command(
    words: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> Ended:  # fmt: skip
    """Runs `python WORDS` as a user would; one thread, so that small runs do not fight."""
    started = time.perf_counter()
    run = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment(env), timeout=timeout,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Ended(run.returncode, run.stdout, run.stderr, time.perf_counter() - started)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a command: this process's, without what an engine has set here, and without a GPU.

    Equal to the last bit is a promise of the CPU.
    """
    inherited = {name: value for name, value in os.environ.items()
                 if name not in _VARIABLES_OF_RANKS}  # fmt: skip
    cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return {**inherited, **cpu, **(extra or {})}


def pretrain(words: Sequence[str]) -> int:
    """`mimkit pretrain` in this process, on the CPU; the exit code."""
    with mock.patch("torch.cuda.is_available", return_value=False):
        return main(["pretrain", *words])


def finetune(words: Sequence[str]) -> int:
    """`mimkit finetune` in this process, on the CPU; the exit code."""
    with mock.patch("torch.cuda.is_available", return_value=False):
        return main(["finetune", *words])
