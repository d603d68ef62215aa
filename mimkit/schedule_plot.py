"""The schedules of a run as a picture, before it begins."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mimkit import build
from mimkit.config import TrainConfig
from mimkit.files import atomic_file

_POINTS = 2000  # of a curve; more than the picture has columns


@dataclass(frozen=True)
class Curve:
    """One line of a panel: a name, and its value before each update."""

    name: str
    value: Callable[[int], float]


def schedules_of(
    train: TrainConfig, *, steps: int, scales: Mapping[str, float] | None = None
) -> dict[str, list[Curve]]:
    """Panel -> curves: learning rate, weight decay, momentum and, where there is one, the average.

    Args:
        scales: name of a layer -> factor of its learning rate; None: one curve for all.
    """
    rate = build.build_schedule(train, steps)
    decay = build.build_weight_decay(train, steps) or _constant(train.weight_decay)
    rates = [Curve(name, _times(rate, factor)) for name, factor in (scales or {"": 1.0}).items()]
    panels = {
        "learning rate": rates,
        "weight decay": [Curve("", decay)],
        "momentum": [Curve(f"beta {number}", _constant(beta))
                     for number, beta in enumerate(train.betas, 1)],
    }  # fmt: skip
    if train.ema is not None:
        panels["average of the weights"] = [Curve("decay", _constant(train.ema))]
    return panels


def _constant(value: float) -> Callable[[int], float]:
    return lambda updates: value


def _times(rate: Callable[[int], float], factor: float) -> Callable[[int], float]:
    return lambda updates: factor * rate(updates)


def save_schedule_plot(
    path: Path, panels: Mapping[str, list[Curve]], *, steps: int, title: str
) -> None:
    """Draws every panel over the updates and writes a PNG."""
    figure = Figure(figsize=(8, 2.4 * len(panels)), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    at = sorted({*range(0, steps, max(1, steps // _POINTS)), steps - 1})
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        _draw(axis, name, curves, at)
    axes[-1].set_xlabel("updates done")
    figure.suptitle(title)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw(axis: Axes, name: str, curves: list[Curve], at: list[int]) -> None:
    for curve in curves:
        axis.plot(at, [curve.value(updates) for updates in at], label=curve.name)
    axis.set_ylabel(name)
    axis.grid(alpha=0.3)
    if any(curve.name for curve in curves):
        axis.legend(fontsize="small", ncols=2)
