"""Whether a trained tokenizer is any good: how it uses its words, how well it redraws images.

A collapsed tokenizer makes the loss of masked image modelling look excellent (facts/paper.md 8,
item 60), so these numbers are logged, written in the card of the weights, and warned about.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# BEiT, Table 8; on other images than yours.
PUBLISHED_MAE = "DALL-E's: 0.0856, BEiT's of ImageNet-1k: 0.0880"
# Limits of collapse, ours: shares of the words that can occur, and of the tokens.
MIN_USED, MIN_PERPLEXITY, MAX_TOP_SHARE = 0.1, 0.05, 0.5


@dataclass(frozen=True)
class TokenHealth:
    """How a set of tokens is spread over the vocabulary."""

    num_tokens: int
    vocabulary: int
    codes_used: int  # words that occur at least once
    entropy: float  # of the words' frequencies, nats: what a predictor without sight would score
    perplexity: float  # exp(entropy): the number of words that equal use would need
    top_share: float  # of all tokens, those that are the most frequent word

    @property
    def possible(self) -> int:
        """Words that can occur: the vocabulary, or the number of tokens if that is smaller."""
        return min(self.vocabulary, self.num_tokens)


def token_counts(target_BN: Tensor, *, vocabulary: int) -> Tensor:
    """How often each word occurs; int64 of length V, ready to be added over batches and ranks."""
    return torch.bincount(target_BN.flatten(), minlength=vocabulary)


def token_health(count_V: Tensor) -> TokenHealth:
    """The measures of a count vector; ValueError if it counts no token."""
    total = int(count_V.sum())
    if total == 0:
        raise ValueError("no tokens were counted")
    share = count_V[count_V > 0].double() / total
    entropy = max(0.0, -float((share * share.log()).sum()))
    return TokenHealth(
        num_tokens=total,
        vocabulary=len(count_V),
        codes_used=len(share),
        entropy=entropy,
        perplexity=math.exp(entropy),
        top_share=float(share.max()),
    )


def collapse_reasons(health: TokenHealth) -> list[str]:
    """Why the tokens count as collapsed; empty if they do not.

    Collapsed means: fewer than `MIN_USED` of the words that could occur do occur; or the perplexity
    is below `MIN_PERPLEXITY` of them; or one word takes more than `MAX_TOP_SHARE` of the tokens.
    """
    possible, reasons = health.possible, list[str]()
    if health.codes_used < MIN_USED * possible:
        reasons.append(f"only {health.codes_used} of {possible} possible words occur")
    if health.perplexity < MIN_PERPLEXITY * possible:
        reasons.append(f"the perplexity is {health.perplexity:.1f} of {possible}")
    if health.top_share > MAX_TOP_SHARE:
        reasons.append(f"one word takes {health.top_share:.0%} of all tokens")
    return reasons


def collapse_warning(health: TokenHealth, *, remedy: str) -> str | None:
    """One paragraph for who trains it if the tokens collapsed, else None.

    Args:
        remedy: how to train it: "with ...".
    """
    reasons = collapse_reasons(health)
    if not reasons:
        return None
    return (
        f"the tokenizer has collapsed: {'; '.join(reasons)}. A masked-token loss against it would "
        f"look excellent and mean nothing. Train it {remedy}."
    )


def reconstruction_sums(image_BChw: Tensor, again_BChw: Tensor) -> dict[str, tuple[Tensor, int]]:
    """How far redrawn images are from the originals, as sums and counts for a `Meter`.

    `mae` and `mse` are means over pixels and channels in units of the range 0..1 (`mae` is what
    BEiT's Table 8 gives), `ssim` one over images. A batch of no image adds nothing under the same
    names.
    """
    error = again_BChw - image_BChw
    return {
        "mae": (error.abs().sum(), error.numel()),
        "mse": (error.square().sum(), error.numel()),
        "ssim": (ssim(image_BChw, again_BChw).sum(), len(image_BChw)),
    }


def psnr(mean_square: float) -> float:
    """Peak signal-to-noise ratio in decibels, of a mean squared error in [0, 1] units."""
    return -10 * math.log10(mean_square) if mean_square > 0 else math.inf


def ssim(image_BChw: Tensor, again_BChw: Tensor) -> Tensor:
    """Structural similarity of each image, 1 where nothing differs (Wang et al. 2004); float32, B.

    A Gaussian window of 11 pixels, deviation 1.5; the mean over channels and all pixels, also those
    at the rim, beyond which the image is mirrored. Sides must have 6 pixels or more.
    """
    if not len(image_BChw):
        return image_BChw.new_zeros(0)
    # here, because it takes seconds: it imports torchvision, scipy and, where it is, transformers
    from torchmetrics.functional.image import structural_similarity_index_measure

    found: Tensor = structural_similarity_index_measure(
        again_BChw, image_BChw, data_range=1.0, reduction="none"
    )
    return found.view(-1)
