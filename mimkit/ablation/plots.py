"""Diagrams of a report as SVG text, drawn by matplotlib."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mimkit.ablation.wording import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]
_WIDTH = 4.4  # inches: on a phone, 3.7 inches wide, letters of 9 points are still read
_MARKERS = "osD^vPX*<>h"  # so that arms are told apart without colours too
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "mimkit",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
}


def diagrams(record: Record) -> dict[str, str]:
    """File name -> SVG, of every diagram that there are numbers for."""
    draw: dict[str, tuple[float, Callable[[Any, Record], bool]]] = {
        "differences.svg": (0.9 + 0.34 * len(record["arms"]), _differences),
        "curves.svg": (3.4, _curves),
        "flops.svg": (3.4, _against_flops),
        "time.svg": (3.4, _against_time),
    }
    found = {name: _svg(record, height, one) for name, (height, one) in draw.items()}
    return {name: svg for name, svg in found.items() if svg is not None}


def _svg(record: Record, height: float, draw: Callable[[Any, Record], bool]) -> str | None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        if not draw(axes, record):
            return None
        if axes.get_legend_handles_labels()[1]:
            _legend(figure, axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _looks(record: Record) -> dict[str, dict[str, Any]]:
    """Colour and marker of each arm, the same in every diagram."""
    import matplotlib as mpl

    palette = mpl.colormaps["tab10" if len(record["arms"]) <= 10 else "tab20"]
    return {
        arm: {"color": str(mpl.colors.to_hex(palette(i))), "marker": _MARKERS[i % len(_MARKERS)]}
        for i, arm in enumerate(record["arms"])
    }


def _sizes(record: Record) -> list[float]:
    """Of markers, in points."""
    count = len(record["arms"])
    return [9 - 4 * number / max(1, count - 1) for number in range(count)]


def _legend(figure: "Figure", axes: "Axes") -> None:
    """Under the diagram, so that it takes no width of it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=3)


def _differences(axes: "Axes", record: Record) -> bool:
    """Corrected intervals of the primary measure, against the reference."""
    study, looks = record["study"], _looks(record)
    rows = [one for one in record["comparisons"][study["primary"]]
            if one["against"] == study["reference"]]  # fmt: skip
    if not rows:
        return False
    for y, one in enumerate(rows):
        value, low, high = _percent(one["corrected"] or one["difference"]["interval"])
        if low is not None and high is not None:
            axes.plot([low, high], [y, y], color=looks[one["arm"]]["color"], lw=2,
                      solid_capstyle="butt")  # fmt: skip
        axes.plot(value, y, linestyle="", ms=6, **looks[one["arm"]])
    axes.axvline(0, color="0.4", lw=0.8)
    axes.set_yticks(range(len(rows)), [one["arm"] for one in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    title = TITLES[study["primary"]]
    axes.set_xlabel(f"{title} accuracy minus that of {study['reference']}, points")
    return True


def _percent(interval: Sequence[float | None]) -> tuple[float, float | None, float | None]:
    value, low, high = interval
    assert value is not None
    if low is None or high is None:
        return 100 * value, None, None
    return 100 * value, 100 * low, 100 * high


def _curves(axes: "Axes", record: Record) -> bool:
    """Mean training loss over seeds; the band is from the lowest to the highest seed."""
    import numpy as np

    looks, drawn = _looks(record), False
    for arm in record["arms"]:
        curves = [run["curve"] for run in record["runs"] if run["arm"] == arm and run["curve"]]
        if not curves:
            continue
        steps = [step for step, _ in min(curves, key=len)]
        loss_SK = np.array([[loss for _, loss in curve[: len(steps)]] for curve in curves])
        axes.plot(steps, loss_SK.mean(0), label=arm, lw=1.4, ms=4, markevery=0.2, **looks[arm])
        axes.fill_between(steps, loss_SK.min(0), loss_SK.max(0), color=looks[arm]["color"],
                          alpha=0.18, lw=0)  # fmt: skip
        drawn = True
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats")
    return drawn


def _against_flops(axes: "Axes", record: Record) -> bool:
    return _against(
        axes, record, "gflops_paper", "GFLOPs of an image, forward, by the paper's rule"
    )


def _against_time(axes: "Axes", record: Record) -> bool:
    return _against(axes, record, "ms_train", "ms of training with an image, one thread")


def _against(axes: "Axes", record: Record, cost: str, label: str) -> bool:
    """Mean accuracy and its interval over seeds against what an arm costs, from nothing on.

    Markers are hollow and shrink from arm to arm, so that none hides another.
    """
    looks, measure, drawn = _looks(record), record["study"]["primary"], False
    for size, (arm, found) in zip(_sizes(record), record["arms"].items(), strict=True):
        if measure not in found["means"]:
            continue
        value, low, high = _percent(found["means"][measure])
        x = found["cost"][cost]
        if low is not None and high is not None:
            axes.plot([x, x], [low, high], color=looks[arm]["color"], lw=1.2, alpha=0.6)
        axes.plot(x, value, linestyle="", ms=size, mfc="none", mew=1.4, label=arm, **looks[arm])
        drawn = True
    axes.set_xlim(0, 1.08 * max(found["cost"][cost] for found in record["arms"].values()))
    axes.set_xlabel(label)
    axes.locator_params(axis="x", nbins=6)
    axes.set_ylabel(f"{TITLES[measure]} accuracy, %")
    return drawn
