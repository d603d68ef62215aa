"""Words that nobody uses start again beside those that many use: which ones, by their use lately.

Ours; neither DALL-E nor BEiT v2 does so.
"""

import torch
from torch import Tensor

APART = 0.1  # how far a word that starts again is from its source, in lengths of the source


@torch.no_grad()
def dead_and_sources(
    share_V: Tensor, count_V: Tensor, *, decay: float, revive: float
) -> tuple[Tensor, Tensor]:
    """Renews the shares by the last counts; the dead words, and for each one of the most used.

    A pair shares the source's tokens from now on. Equal on all ranks if the counts are.

    Args:
        share_V: of the tokens, averaged over updates; changed in place.
        count_V: of the last update, all ranks'.
        decay: of the average.
        revive: words below this part of an equal share are dead; 0: none ever is.
    """
    share_V.lerp_(count_V / count_V.sum(), 1 - decay)
    dead_X = (share_V < revive / len(share_V)).nonzero()[:, 0]
    dead_X = dead_X[: len(share_V) // 2]  # each needs a living one to part from
    source_X = share_V.argsort(descending=True, stable=True)[: len(dead_X)]
    share_V[source_X] /= 2
    share_V[dead_X] = share_V[source_X]
    return dead_X, source_X


def near(row_XD: Tensor, *, generator: torch.Generator) -> Tensor:
    """Rows at a distance of `APART` times their length, in directions drawn on the CPU."""
    noise_XD = torch.randn(row_XD.shape, generator=generator).to(row_XD)
    noise_XD = torch.nn.functional.normalize(noise_XD, dim=1)
    return row_XD + APART * row_XD.norm(dim=1, keepdim=True) * noise_XD
