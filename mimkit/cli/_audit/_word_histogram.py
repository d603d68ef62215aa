"""How often each word of a tokenizer occurs, as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mimkit.batch import Batch, to_unit
from mimkit.files import atomic_file
from mimkit.tokenizers import VisualTokenizer
from mimkit.tokenizers._dvae_health import token_counts, token_health


@torch.no_grad()
def save_word_histogram(
    path: Path, tokenizer: VisualTokenizer, views: Sequence[Batch], *, name: str
) -> None:
    """A PNG: words from the most frequent one on by their share, and how many have which count."""
    assert tokenizer.vocabulary is not None
    target_BN = torch.cat([tokenizer.encode(to_unit(batch.token_view_BChw)) for batch in views])
    count_V = token_counts(target_BN, vocabulary=tokenizer.vocabulary)
    health = token_health(count_V)
    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # objects only, never pyplot: nothing global
    figure.suptitle(
        f"{name}: {health.codes_used} of {health.vocabulary} words in {health.num_tokens:,} "
        f"patches, entropy {health.entropy:.2f} nats (ln V {math.log(health.vocabulary):.2f})",
        fontweight="bold",
    )
    ranked, counted = figure.subplots(1, 2)
    _draw_ranks(ranked, np.sort(count_V.numpy())[::-1])
    _draw_counts(counted, count_V.numpy())
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_ranks(axes: Axes, count_V: NDArray[np.int64]) -> None:
    """Logarithmic upwards: equal use is the dashed line, a collapsed tokenizer a cliff."""
    share_V = count_V / count_V.sum()
    used = int((count_V > 0).sum())
    axes.step(np.arange(1, used + 1), share_V[:used], where="mid", lw=2)
    axes.axhline(1 / len(count_V), ls="--", color="grey", label="equal use of all words")
    axes.axvspan(used, len(count_V), color="lightgrey", alpha=0.5, label="never used here")
    axes.set(yscale="log", xlim=(1, len(count_V)), xlabel="words, from the most frequent one on",
             ylabel="share of the patches")  # fmt: skip
    axes.legend()


def _draw_counts(axes: Axes, count_V: NDArray[np.int64]) -> None:
    """How many words occur 1, 2-3, 4-7, ... times."""
    used = count_V[count_V > 0]
    edges = 2.0 ** np.arange(math.ceil(math.log2(used.max() + 1)) + 1)
    words, _ = np.histogram(used, edges)
    places = np.arange(-1, len(words))
    heights = np.concatenate([[len(count_V) - len(used)], words])
    bars = axes.bar(places, heights, color=["lightgrey"] + ["tab:blue"] * len(words))
    axes.bar_label(bars)
    axes.set_xticks(places, ["never", *(_range(low) for low in edges[:-1])], rotation=45,
                    ha="right", rotation_mode="anchor")  # fmt: skip
    axes.set(xlabel="times that a word occurs", ylabel="words")


def _range(low: float) -> str:
    return f"{low:.0f}" if low == 1 else f"{low:.0f}-{2 * low - 1:.0f}"
