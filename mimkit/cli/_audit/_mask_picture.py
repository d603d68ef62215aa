"""A mask's certificate as a picture."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure

from mimkit.audit.mask import BoolArray, MaskCertificate
from mimkit.files import atomic_file

_MOST_NUMBERS = 24  # rows or columns; more would not be readable
EXAMPLES = 12


def save_mask_picture(path: Path, certificate: MaskCertificate, example_KHW: BoolArray) -> None:
    """A PNG: the marginal with its numbers, beside `EXAMPLES` draws."""
    # Objects only, never pyplot: nothing global, and Agg whatever the machine has as a screen.
    figure = Figure(figsize=(12, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(certificate), fontsize=14, fontweight="bold")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1.1, 1))[0]
    _draw_marginal(left, certificate)
    _draw_examples(right, example_KHW)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")


def _title(certificate: MaskCertificate) -> str:
    rows, columns = certificate.grid
    return (
        f"{certificate.mask}: {certificate.count} of {rows} x {columns} patches, mean "
        f"{certificate.mean_count:.2f} in {certificate.draws:,} draws"
    )


def _draw_marginal(figure: SubFigure, certificate: MaskCertificate) -> None:
    """Heat map from 0 to 100 % in every picture, so that pictures can be compared."""
    percent_HW = 100 * np.array(certificate.marginal)
    figure.suptitle("how often each patch is masked, in %", fontsize=12)
    axes = figure.subplots()
    image = axes.imshow(percent_HW, vmin=0, vmax=100, cmap="viridis")
    axes.set(xticks=[], yticks=[])
    axes.set_xlabel(
        f"corner {certificate.corner:.0%}, rim {certificate.edge:.0%}, centre "
        f"{certificate.centre:.0%} (the same everywhere would be "
        f"{certificate.mean_count / percent_HW.size:.0%})\n"
        f"mirror symmetry: p = {certificate.symmetric:.2g} (below 0.01: lopsided)"
    )
    figure.colorbar(
        image,
        ax=axes,
        shrink=min(0.8, 0.8 * certificate.grid[0] / certificate.grid[1]),
        format="%d %%",
    )
    if max(certificate.grid) <= _MOST_NUMBERS:
        for (row, column), percent in np.ndenumerate(percent_HW):
            axes.text(column, row, f"{percent:.0f}", ha="center", va="center",
                      fontsize=min(9, 140 / max(certificate.grid)),
                      color="white" if percent < 60 else "black")  # fmt: skip


def _draw_examples(figure: SubFigure, example_KHW: BoolArray) -> None:
    figure.suptitle(f"{EXAMPLES} draws (dark: masked)", fontsize=12)
    for axes, mask_HW in zip(figure.subplots(3, 4).flat, example_KHW, strict=True):
        height, width = mask_HW.shape
        axes.pcolormesh(mask_HW, vmin=0, vmax=1.3, cmap="Greys", edgecolors="lightgrey", lw=0.5)
        axes.set(xticks=[], yticks=[], aspect="equal", ylim=(height, 0), xlim=(0, width))
        axes.set_title(f"{mask_HW.sum()} masked", fontsize=9)
