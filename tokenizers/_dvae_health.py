"""Whether a trained tokenizer is any good: how it uses its words, how well it redraws images.

A collapsed tokenizer makes the loss of masked image modelling look excellent (facts/paper.md 8,
item 60), so these numbers are logged, written in the card of the weights, and warned about.
"""

import math
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw
from torch import Tensor


@dataclass(frozen=True)
class TokenHealth:
    """How a set of tokens is spread over the vocabulary."""

    num_tokens: int
    vocabulary: int
    codes_used: int  # words that occur at least once
    entropy: float  # of the words' frequencies, nats: what a predictor without sight would score
    perplexity: float  # exp(entropy): the number of words that equal use would need
    top_share: float  # of all tokens, those that are the most frequent word


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


def collapse_warning(
    health: TokenHealth,
    *,
    min_used: float = 0.1,
    min_perplexity: float = 0.05,
    max_top_share: float = 0.5,
) -> str | None:
    """One paragraph if the tokens collapsed, else None.

    Collapsed means: fewer than `min_used` of the words that could occur (the vocabulary, or the
    number of tokens if that is smaller) do occur; or the perplexity is below `min_perplexity` of
    it; or one word takes more than `max_top_share` of the tokens. The limits are ours.
    """
    possible = min(health.vocabulary, health.num_tokens)
    reasons = []
    if health.codes_used < min_used * possible:
        reasons.append(f"only {health.codes_used} of {possible} possible words occur")
    if health.perplexity < min_perplexity * possible:
        reasons.append(f"the perplexity is {health.perplexity:.1f} of {possible}")
    if health.top_share > max_top_share:
        reasons.append(f"one word takes {health.top_share:.0%} of all tokens")
    if not reasons:
        return None
    return (
        f"the tokenizer has collapsed: {'; '.join(reasons)}. A masked-token loss against it would "
        "look excellent and mean nothing. Train it with a lower kl_weight, a lower lr or longer."
    )


def reconstruction_error(image_BChw: Tensor, reconstruction_BChw: Tensor) -> tuple[float, float]:
    """Mean absolute error in [0, 1] units, and PSNR in decibels of the batch's mean square."""
    difference = image_BChw.double() - reconstruction_BChw.double()
    return float(difference.abs().mean()), psnr(float(difference.square().mean()))


def psnr(mean_square: float) -> float:
    """Peak signal-to-noise ratio in decibels, of a mean squared error in [0, 1] units."""
    return -10 * math.log10(mean_square) if mean_square > 0 else math.inf


def reconstruction_picture(
    image_BChw: Tensor, reconstruction_BChw: Tensor, *, scale: int = 2
) -> Image.Image:
    """Originals in the top row, reconstructions below, each row labelled; pixels in [0, 1]."""
    rows = {"original": image_BChw, "reconstruction": reconstruction_BChw}
    num, _, height, width = image_BChw.shape
    caption, gap = 14, 2
    row_height = height * scale + caption + gap
    size = (max(num * (width * scale + gap) + gap, 100), len(rows) * row_height + gap)
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for row, (label, batch) in enumerate(rows.items()):
        top = gap + row * row_height
        draw.text((gap, top), label, fill="black")
        for column, image_Chw in enumerate(batch):
            tile = _to_pil(image_Chw).resize(
                (width * scale, height * scale), Image.Resampling.NEAREST
            )
            picture.paste(tile, (gap + column * (width * scale + gap), top + caption))
    return picture


def _to_pil(image_Chw: Tensor) -> Image.Image:
    pixel_hwC = (
        (image_Chw.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
    )
    return Image.fromarray(pixel_hwC.numpy())
