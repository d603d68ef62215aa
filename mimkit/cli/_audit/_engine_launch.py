"""Trainings as processes of their own, one rank or many, for the engine audit."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mimkit.errors import UserError
from mimkit.ports import free_port

_VARIABLES_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE",
                       "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
_LAUNCHERS_WORDS = re.compile(r"^(?:[WE]\d{4} |Traceback )", re.MULTILINE)
_ROOT = Path(__file__).resolve().parents[3]  # so that a checkout that is not installed works


def train(config: Path, *, ranks: int, patience: float) -> None:
    """`mimkit pretrain --config CONFIG` to its end.

    Raises:
        UserError: it failed, with what it said, or took longer than `patience` seconds.
    """
    words = ["-m", "mimkit", "pretrain", "--config", str(config)]
    if ranks > 1:
        words = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_addr",
                 "127.0.0.1", "--master_port", str(free_port()), *words]  # fmt: skip
    try:
        ended = subprocess.run(
            [sys.executable, *words], env=_environment(ranks), capture_output=True, text=True,
            check=False, timeout=patience,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{config.stem}: {ranks} ranks were not done after {patience:.0f} s; take fewer "
            "--steps, a smaller --batch or a smaller model"
        ) from error
    if ended.returncode:
        raise UserError(f"the training '{config.stem}' on {ranks} ranks ended with exit code "
                        f"{ended.returncode}: {_reason(ended.stderr)}")  # fmt: skip


def _environment(ranks: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items()
                 if name not in _VARIABLES_OF_RANKS}  # fmt: skip
    path = os.pathsep.join(filter(None, [str(_ROOT), inherited.get("PYTHONPATH")]))
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {"OMP_NUM_THREADS": str(threads), **inherited, "PYTHONPATH": path}


def _reason(err: str) -> str:
    """What mimkit complained about; else the last lines."""
    _, found, said = err.partition("mimkit: ")
    if found:
        return " ".join(_LAUNCHERS_WORDS.split(said)[0].split())
    return " / ".join(line.strip() for line in err.strip().splitlines()[-5:])
