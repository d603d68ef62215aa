"""The health of a tokenizer on real views: how its words are used, how firm, and where they are.

A masked-token loss means something only if the targets differ between patches, come from the crop
that the encoder sees, and stand in the order of its patches (facts/paper.md 8, items 35-41, 60).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mimkit.audit._tokenizer_views import (
    Table,
    agreement,
    agreement_around,
    observe,
    relative_spread,
    resized,
)
from mimkit.batch import Batch, Grid, to_unit
from mimkit.tokenizers import VisualTokenizer
from mimkit.tokenizers._dvae_health import (
    TokenHealth,
    psnr,
    reconstruction_sums,
    token_counts,
    token_health,
)
from mimkit.train.metrics import Meter

_SAME, _RIGHT = (1, 1), (1, 2)  # row and column in a table of neighbours


@dataclass(frozen=True)
class Placement:
    """Whether targets lie where they belong.

    Attributes:
        right: agreement at the place where they belong.
        wrong: the largest agreement at the eight other places.
        table: agreement with the patch at the same place (in the middle) and with its neighbours,
            rows from above to below.
    """

    right: float
    wrong: float
    table: Table


@dataclass(frozen=True)
class TokenizerHealth:
    """What was measured. Shares and agreements are at most 1, entropies in nats.

    Attributes:
        tokenizer: its name and settings.
        images, grid: how many views, and the rows and columns of their patches.
        vocabulary: V; None for targets that are numbers, which have no `words` but a `spread`.
        words: how the words are used.
        spread: standard deviation of the numbers relative to their root mean square.
        stable_shift: agreement of the targets with those of the views moved by one pixel.
        stable_jpeg90, stable_jpeg75: with those of the views recompressed at that quality.
        same_crop: agreement of the token view's targets with those of the encoder's view, which
            must be largest at the same place; None for a grid without inner patches.
        moved_crop: the same for an encoder's view that was moved one patch to the right on
            purpose, so it must be largest at the place to the right.
    """

    tokenizer: str
    images: int
    grid: Grid
    vocabulary: int | None
    words: TokenHealth | None
    spread: float | None
    stable_shift: float
    stable_jpeg90: float
    stable_jpeg75: float
    same_crop: Placement | None
    moved_crop: Placement | None


def measure(
    tokenizer: VisualTokenizer,
    views: Sequence[Batch],
    *,
    name: str,
    device: torch.device | str = "cpu",
) -> TokenizerHealth:
    """Encodes every view six times and compares.

    Args:
        views: of real images, as training makes them; masks are not looked at.
        name: what the tokenizer is called.
        device: where it lies.

    Raises:
        UserError: a target is not finite.
    """
    seen = observe(tokenizer, views, device=device)
    target, words, spread = seen.target, None, None
    if tokenizer.vocabulary is None:
        spread = relative_spread(target)
    else:
        words = token_health(token_counts(target, vocabulary=tokenizer.vocabulary))
    return TokenizerHealth(
        tokenizer=name,
        images=len(target),
        grid=seen.grid,
        vocabulary=tokenizer.vocabulary,
        words=words,
        spread=spread,
        stable_shift=agreement(target, seen.shifted),
        stable_jpeg90=agreement(target, seen.recompressed[90]),
        stable_jpeg75=agreement(target, seen.recompressed[75]),
        same_crop=_placement(agreement_around(target, seen.same_crop, grid=seen.grid), _SAME),
        moved_crop=_placement(agreement_around(target, seen.moved_crop, grid=seen.grid), _RIGHT),
    )


def _placement(table: Table | None, belongs: tuple[int, int]) -> Placement | None:
    if table is None:
        return None
    places = {(row, column): table[row][column] for row in range(3) for column in range(3)}
    right = places.pop(belongs)
    return Placement(right, max(places.values()), table)


@dataclass(frozen=True)
class Reconstruction:
    """Images redrawn from their words, against the originals.

    Attributes:
        mae: mean absolute pixel error in units of the range 0..1, as in BEiT's Table 8.
        psnr: decibels of the mean squared error; infinite where nothing differs.
        ssim: mean structural similarity.
    """

    mae: float
    psnr: float
    ssim: float


@torch.no_grad()
def reconstruction(
    tokenizer: VisualTokenizer,
    views: Iterable[Batch],
    *,
    size: int | None = None,
    device: torch.device | str = "cpu",
) -> Reconstruction | None:
    """None where the tokenizer draws nothing, or numbers that need not be the pixels.

    Args:
        views: what is compared is their token view; padding is left out.
        size: views are resized to this side before they are encoded, and back when they are
            redrawn, so that tokenizers of patches of other sizes are compared on the same pixels
            at the same number of tokens.
    """
    if tokenizer.vocabulary is None or not tokenizer.can_decode:
        return None
    meter = Meter()
    for batch in views:
        view_BChw = to_unit(batch.token_view_BChw[batch.index_B >= 0]).to(device)
        if len(view_BChw):
            again_BChw = redrawn(tokenizer, view_BChw, size=size)
            meter.add(reconstruction_sums(view_BChw, again_BChw))
    means = meter.means(lambda tensor: tensor)
    return Reconstruction(means["mae"], psnr(means["mse"]), means["ssim"])


@torch.no_grad()
def redrawn(tokenizer: VisualTokenizer, view_BChw: Tensor, *, size: int | None = None) -> Tensor:
    """The views, encoded and decoded; as larger or smaller ones where a `size` is given."""
    height, width = view_BChw.shape[2:]
    if size is not None and (height, width) != (size, size):
        return resized(redrawn(tokenizer, resized(view_BChw, (size, size))), (height, width))
    return tokenizer.decode(tokenizer.encode(view_BChw), tokenizer.grid(height, width))
