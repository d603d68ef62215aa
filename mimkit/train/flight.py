"""The flight recorder: the last updates of this rank in memory, and on disk when training fails.

Kept are references to what is there anyway (sample numbers, losses and gradient norms as tensors
on the device) and one fused kernel for the norms of the weights, so that nothing is waited for.
Views, masks and drop path are drawn from keys (seed, epoch, sample, purpose), which follow from an
update's position: no state of a generator is needed. Weights are not kept: those of the last
checkpoint and the updates since then give them again (`mimkit replay`).

A dump is a folder `flight/update-00000123` of the run, with two files of each rank:
`rank-00000.json` (what happened, update by update) and `rank-00000.safetensors` (sample numbers,
norms). Every rank writes its own, without waiting for others, of which some may be gone.
"""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mimkit.batch import Batch
from mimkit.errors import Interrupted, UserError
from mimkit.files import replacing

FORMAT = 2
KEPT = 64  # updates: those since the last line of metrics, and more; under 2 MB with 256 samples


@dataclass
class _Update:
    number: int  # updates done before it: after a way back the same numbers come again
    position: int  # samples of all ranks consumed before it, which come once
    first_rows: list[int] = field(default_factory=list)  # of its micro-batches, in the global batch
    index: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # of the optimizer's groups
    decays: list[float] = field(default_factory=list)
    grad_norm: Tensor | None = None
    weight_norms: Tensor | None = None  # afterwards, of every parameter
    seconds: float | None = None  # since the update before


class FlightRecorder:
    """What one rank did in its last updates.

    Args:
        folder: of the run; dumps go into `flight/` there, on this rank's machine.
        facts: what a replay must know besides: seed, batch sizes, precision.
        kept: how many updates.
    """

    def __init__(
        self, folder: Path, *, rank: int, world: int, facts: Mapping[str, Any], kept: int = KEPT
    ) -> None:
        self._folder, self._rank, self._world = folder, rank, world
        self._facts = dict(facts)
        self._updates: deque[_Update] = deque(maxlen=kept)
        self._names: list[str] = []
        self._since = time.perf_counter()

    def begin(self, batch: Batch, *, updates: int, first_row: int, position: int) -> None:
        """A micro-batch is about to go forward: samples `first_row`... of update `updates`.

        Args:
            position: samples of all ranks consumed before this update.
        """
        if not self._updates or self._updates[-1].position != position:
            self._updates.append(_Update(updates, position))
        self._updates[-1].first_rows.append(first_row)
        self._updates[-1].index.append(batch.index_B)

    def loss(self, loss: Tensor) -> None:
        """Of the micro-batch that began last."""
        self._updates[-1].losses.append(loss.detach())

    def end(
        self,
        *,
        optimizer: torch.optim.Optimizer,
        grad_norm: Tensor | None,
        parts: Mapping[str, Tensor],
    ) -> None:
        """The update is made; `parts` are the weights, or what this rank holds of them."""
        update, now = self._updates[-1], time.perf_counter()
        update.rates = [group["lr"] for group in optimizer.param_groups]
        update.decays = [group["weight_decay"] for group in optimizer.param_groups]
        update.grad_norm = grad_norm
        self._names = list(parts)
        update.weight_norms = torch.stack(torch._foreach_norm([p.detach() for p in parts.values()]))
        update.seconds, self._since = now - self._since, now

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Writes a dump when what is inside fails, and raises the error on.

        A mistake of the user's (a full disk, bad samples) is no failure of an update, unless the
        loss or the gradient is not finite; Ctrl-C is none either.
        """
        self._since = time.perf_counter()
        try:
            yield
        except (KeyboardInterrupt, SystemExit, Interrupted):
            raise
        except UserError as error:
            if not self._updates or self.first_not_finite() is None:
                raise
            raise type(error)(f"{error}. {_said(self.dump(str(error)))}") from error
        except BaseException as error:
            if self._updates:
                said = _said(self.dump(f"{type(error).__name__}: {error}"))
                print(f"flight recorder of rank {self._rank}: {said}", file=sys.stderr, flush=True)
            raise

    def first_not_finite(self) -> int | None:
        """Updates done before the first one kept whose loss or gradient norm is not finite.

        Since the last way back: what was before it is not what the run has become.
        """
        found, last = None, -1
        for update in self._updates:
            if update.number <= last:
                found = None
            last = update.number
            values = [*_numbers(update.losses), *_numbers([update.grad_norm])]
            if found is None and any(v is not None and not math.isfinite(v) for v in values):
                found = update.number
        return found

    def dump(self, reason: str) -> Path | None:
        """Writes what is kept; None where it cannot be written, which is no reason to fail.

        Args:
            reason: why, in words.
        """
        suspect = self.first_not_finite()
        suspect = self._updates[-1].number if suspect is None else suspect
        folder = self._folder / "flight" / f"update-{suspect + 1:08d}"
        path = folder / f"rank-{self._rank:05d}.json"
        story = {
            "format": FORMAT, "reason": reason, "suspect": suspect, "rank": self._rank,
            "world": self._world, "written": time.time(), "facts": self._facts,
            "parameters": self._names, "updates": [_row(update) for update in self._updates],
        }  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path.with_suffix(".safetensors")) as temporary:
                save_file(self._tensors(), temporary)
                temporary.chmod(0o644)  # safetensors makes it readable for its owner only
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(story, indent=1), encoding="utf-8")
        except (OSError, RuntimeError):
            return None
        return folder

    def _tensors(self) -> dict[str, Tensor]:
        found = {}
        for update in self._updates:
            for micro, index_B in enumerate(update.index):
                found[f"index/{update.position}/{micro}"] = index_B.cpu()
            if update.weight_norms is not None:
                found[f"weight_norms/{update.position}"] = update.weight_norms.float().cpu()
        return found


def _row(update: _Update) -> dict[str, Any]:
    norm = _numbers([update.grad_norm])
    return {
        "update": update.number, "position": update.position, "first_rows": update.first_rows,
        "samples": [len(index_B) for index_B in update.index],
        "losses": [_said_number(value) for value in _numbers(update.losses)],
        "grad_norm": _said_number(norm[0]) if norm else None,
        "lr": update.rates, "weight_decay": update.decays, "seconds": update.seconds,
    }  # fmt: skip


def _numbers(values: Sequence[Tensor | None]) -> list[float | None]:
    """None where there is nothing, or where a broken device no longer tells."""
    found: list[float | None] = []
    for value in values:
        try:
            found.append(None if value is None else float(value))
        except RuntimeError:
            found.append(None)
    return found


def _said_number(value: float | None) -> float | str | None:
    """JSON has no word for a number that is none."""
    return value if value is None or math.isfinite(value) else str(value)


def _said(folder: Path | None) -> str:
    if folder is None:
        return "what led to it could not be written down"
    return (f"What led to it is in {folder}; mimkit replay {folder} repeats that update and names "
            "the sample or the layer")  # fmt: skip
