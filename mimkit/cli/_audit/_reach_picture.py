"""What a token sees, as a picture."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mimkit.audit.leak import measured_reach, sensitivity
from mimkit.files import atomic_file
from mimkit.models.stems import Stem

_AROUND = 2  # patches on each side


def save_reach_picture(path: Path, stem: Stem, *, name: str) -> None:
    """A PNG: how much each pixel moves the middle token, its patch and the declared reach."""
    figure = Figure(figsize=(6.4, 6.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # objects only, never pyplot: nothing global
    seen_HW = sensitivity(stem, around=_AROUND)
    figure.suptitle(f"{name}: what the middle token sees", fontsize=14, fontweight="bold")
    axes = figure.subplots()
    with np.errstate(divide="ignore"):
        decades_HW = np.log10(seen_HW / seen_HW.max())
    colours = axes.imshow(np.ma.masked_invalid(decades_HW), vmin=-3, vmax=0, cmap="viridis")
    axes.set_facecolor("white")
    patch, side = stem.patch_size, len(seen_HW)
    axes.set(xticks=np.arange(0, side + 1, patch) - 0.5, yticks=np.arange(0, side + 1, patch) - 0.5)
    axes.set(xticklabels=range(-_AROUND, _AROUND + 2), yticklabels=range(-_AROUND, _AROUND + 2))
    axes.grid(color="lightgrey")
    before, behind = stem.reach_sides
    first = _AROUND * patch - 0.5
    corner, length = first - before, before + patch + behind
    axes.add_patch(Rectangle((first, first), patch, patch, fill=False, ec="black", lw=2,
                             label="its own patch"))  # fmt: skip
    axes.add_patch(Rectangle((corner, corner), length, length, fill=False, ec="red", lw=2, ls="--",
                             label="declared reach"))  # fmt: skip
    axes.legend(loc="lower left", framealpha=1)
    axes.set_xlabel(
        f"patches; white: no influence at all\nreach beyond the patch: declared {stem.reach} "
        f"pixels, measured {measured_reach(stem)}"
    )
    bar = figure.colorbar(colours, ax=axes, shrink=0.8, ticks=[-3, -2, -1, 0])
    bar.set_ticklabels(["1/1000 or less", "1/100", "1/10", "strongest"])
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")
