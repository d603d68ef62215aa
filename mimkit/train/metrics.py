"""What a run says while it runs: sums over steps and ranks, JSON lines, TensorBoard, a bar."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mimkit.files import disk_errors, write_text
from mimkit.train.spikes import Spike

Sums = Mapping[str, tuple[Tensor, int]]


class Meter:
    """Sums on the device until somebody asks for the means; one exchange between ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, sums: Sums) -> None:
        for name, (value, count) in sums.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach().double()  # type: ignore[assignment]
            self._counts[name] = self._counts.get(name, 0) + count

    def means(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The means over everything added, on all ranks; the meter is empty afterwards."""
        totals = self.totals(sum_over_ranks).items()
        return {name: total / count for name, (total, count) in totals}

    def clear(self) -> None:
        self._sums, self._counts = {}, {}

    def put_back(self, pending: Mapping[str, Sequence[float]], device: torch.device) -> None:
        """What `pending` gave before a run was stopped."""
        for name, (value, count) in pending.items():
            self.add({name: (torch.tensor(value, dtype=torch.float64, device=device), int(count))})

    def pending(self) -> dict[str, tuple[float, int]]:
        """What this rank has added since the last means."""
        return {name: (float(value), self._counts[name]) for name, value in self._sums.items()}

    def totals(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, tuple[float, float]]:
        """(sum, count) of everything added, on all ranks; the meter is empty afterwards."""
        if not self._sums:
            return {}
        names = sorted(self._sums)
        device = self._sums[names[0]].device
        totals = torch.stack([self._sums[name] for name in names])
        counts = torch.tensor([self._counts[name] for name in names], device=device).double()
        totals, counts = sum_over_ranks(torch.stack([totals, counts])).tolist()
        self.clear()
        return dict(zip(names, zip(totals, counts, strict=True), strict=True))


class Recorder:
    """`metrics.jsonl`, TensorBoard and the progress bar of one run; only rank 0 makes one.

    Args:
        start: updates already done; later lines of an interrupted run are dropped, so that a
            resumed run leaves the same file as an uninterrupted one.
    """

    def __init__(self, folder: Path, *, start: int, steps: int, tensorboard: bool) -> None:
        self._path = folder / "metrics.jsonl"
        # a run that only misses its end measures again what belongs there
        self._drop_lines_after(start, measured_again=start == steps)
        self._file = self._path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(  # type: ignore[no-untyped-call]
                str(folder / "tensorboard"), purge_step=start + 1 if start else None
            )
        quiet = not sys.stderr.isatty()
        self._bar = tqdm(
            total=steps, initial=start, unit="step", desc="training", dynamic_ncols=True,
            mininterval=10 if quiet else 0.1, file=sys.stderr, smoothing=0.1,
        )  # fmt: skip

    def _drop_lines_after(self, step: int, *, measured_again: bool = False) -> None:
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        if measured_again:
            kept = [line for line in kept if _step_of(line) < step or _kind_of(line) != "heldout"]
        write_text(self._path, "".join(f"{line}\n" for line in kept))

    def advance(self, updates: int) -> None:
        self._bar.update(updates)

    def write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """One line: the kind of event, the updates done, and the numbers."""
        with disk_errors(self._path):
            self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)
        if kind == "train":
            shown = {"loss": "{:.3f}", "accuracy": "{:.3f}", "images_per_second": "{:.0f}/s"}
            if values.get("substituted_samples"):
                shown["substituted_samples"] = "{:.0f}"
            self._bar.set_postfix_str(
                " ".join(f"{k.split('_')[0]}={f.format(values[k])}"
                         for k, f in shown.items() if k in values)
            )  # fmt: skip

    def spike(self, spike: Spike, samples: Sequence[int]) -> None:
        """A loss that jumped: a line of kind `spike`, and a word to whoever watches."""
        with disk_errors(self._path):
            line = {"step": spike.update, "kind": "spike", "loss": spike.loss,
                    "median": spike.median, "samples": list(samples)}  # fmt: skip
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        self.say(f"loss spike at update {spike.update}: {spike.loss:.4g}, median before "
                 f"{spike.median:.4g}; its samples are in metrics.jsonl")  # fmt: skip

    def go_back(self, updates: int, *, why: str) -> None:
        """Drops the lines after `updates`, to which the run has gone back."""
        self._file.close()
        self._drop_lines_after(updates)
        self._file = self._path.open("a", encoding="utf-8")
        self._bar.n = updates
        self.say(f"back to update {updates}, on with the next samples: {why}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.clear()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()
        with disk_errors(self._path):
            self._file.close()
        if self._board is not None:
            self._board.close()


def _kind_of(line: str) -> str:
    return str(json.loads(line)["kind"])


def _step_of(line: str) -> float:
    """The step of a metrics line; a line that was cut in writing counts as later than any."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")
