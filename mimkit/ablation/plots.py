"""Diagrams of a report as SVG text, drawn by matplotlib."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
_WIDTH = 6.4  # inches; fits a phone when it is scaled to the screen
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
        "curves.svg": (3.2, _curves),
        "flops.svg": (3.0, _against_flops),
        "time.svg": (3.0, _against_time),
    }
    found = {name: _svg(record, height, one) for name, (height, one) in draw.items()}
    return {name: svg for name, svg in found.items() if svg is not None}


def _svg(record: Record, height: float, draw: Callable[[Any, Record], bool]) -> str | None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        if not draw(figure.subplots(), record):
            return None
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def colours(record: Record) -> dict[str, str]:
    """One for each arm, the same in every diagram."""
    import matplotlib as mpl

    palette = mpl.colormaps["tab10" if len(record["arms"]) <= 10 else "tab20"]
    return {arm: str(mpl.colors.to_hex(palette(i))) for i, arm in enumerate(record["arms"])}


def _differences(axes: "Axes", record: Record) -> bool:
    """Corrected intervals of the primary measure, against the reference."""
    study, shade = record["study"], colours(record)
    rows = [one for one in record["comparisons"][study["primary"]]
            if one["against"] == study["reference"]]  # fmt: skip
    for y, one in enumerate(rows):
        value, low, high = _percent(one["corrected"] or one["difference"]["interval"])
        if low is not None and high is not None:
            axes.plot([low, high], [y, y], color=shade[one["arm"]], lw=2, solid_capstyle="butt")
        axes.plot(value, y, "o", color=shade[one["arm"]], ms=6)
    axes.axvline(0, color="0.4", lw=0.8)
    axes.set_yticks(range(len(rows)), [one["arm"] for one in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"{study['primary']} accuracy minus {study['reference']}, points")
    return bool(rows)


def _percent(interval: Sequence[float | None]) -> tuple[float, float | None, float | None]:
    value, low, high = interval
    assert value is not None
    if low is None or high is None:
        return 100 * value, None, None
    return 100 * value, 100 * low, 100 * high


def _curves(axes: "Axes", record: Record) -> bool:
    """Mean training loss over seeds; the band is from the lowest to the highest seed."""
    import numpy as np

    shade, drawn = colours(record), False
    for arm in record["arms"]:
        curves = [run["curve"] for run in record["runs"] if run["arm"] == arm and run["curve"]]
        if not curves:
            continue
        steps = [step for step, _ in min(curves, key=len)]
        loss_SK = np.array([[loss for _, loss in curve[: len(steps)]] for curve in curves])
        axes.plot(steps, loss_SK.mean(0), color=shade[arm], label=arm, lw=1.4)
        axes.fill_between(steps, loss_SK.min(0), loss_SK.max(0), color=shade[arm], alpha=0.18, lw=0)
        drawn = True
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats")
    if drawn:
        axes.legend(fontsize=7.5, frameon=False, ncols=2)
    return drawn


def _against_flops(axes: "Axes", record: Record) -> bool:
    return _against(axes, record, "gflops", "GFLOPs of an image, forward (a multiply-add is two)")


def _against_time(axes: "Axes", record: Record) -> bool:
    return _against(axes, record, "ms_train", "ms of an image, forward and backward, one thread")


def _against(axes: "Axes", record: Record, cost: str, label: str) -> bool:
    """Mean accuracy and its interval over seeds against what an arm costs."""
    shade, measure, drawn = colours(record), record["study"]["primary"], False
    for arm, found in record["arms"].items():
        if measure not in found["means"]:
            continue
        value, low, high = _percent(found["means"][measure])
        x = found["cost"][cost]
        if low is not None and high is not None:
            axes.plot([x, x], [low, high], color=shade[arm], lw=1.2, alpha=0.6)
        axes.plot(x, value, "o", color=shade[arm], ms=6, label=arm)
        drawn = True
    axes.set_xlabel(label)
    axes.set_ylabel(f"{measure} accuracy, %")
    if drawn:
        axes.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn
