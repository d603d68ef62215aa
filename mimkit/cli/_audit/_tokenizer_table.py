"""The health of a tokenizer as a table: what was measured, and what is normal."""

import math

from mimkit.audit.tokenizer import Placement, Reconstruction, TokenizerHealth
from mimkit.audit.tokenizer_verdict import LEAST_SPREAD, MOST_COMMON, least_entropy
from mimkit.tokenizers._dvae_health import (
    MAX_TOP_SHARE,
    MIN_PERPLEXITY,
    MIN_USED,
    PUBLISHED_MAE,
    TokenHealth,
)

Row = tuple[str, str, str]


def table(health: TokenizerHealth, drawn: Reconstruction | None) -> str:
    """A line for each measure."""
    rows = [
        ("measure", "found", "normal"),
        *_use(health),
        ("target stays, moved by 1 pixel", f"{health.stable_shift:.1%}",
         "no limit; what does not stay is chance"),
        ("target stays, JPEG quality 90", f"{health.stable_jpeg90:.1%}", "no limit"),
        ("target stays, JPEG quality 75", f"{health.stable_jpeg75:.1%}", "less than at 90"),
        *_placement("encoder's view", "same patch", health.same_crop),
        *_placement("that moved 1 patch", "patch to the right", health.moved_crop),
        *_drawn(drawn),
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{a:{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in rows)


def _use(health: TokenizerHealth) -> list[Row]:
    if health.words is None:
        limit = f"{LEAST_SPREAD:.0%} or more, else dead"
        return [("spread of the numbers", f"{health.spread:.1%}", limit)]
    words = health.words
    return [
        ("words used", f"{words.codes_used} of {words.vocabulary}", f"{_share(words, MIN_USED)}"),
        ("unigram entropy, nats", f"{words.entropy:.3f}",
         f"{least_entropy(words.vocabulary):.2f} or more, else dead; ln V is "
         f"{math.log(words.vocabulary):.3f}"),
        ("perplexity", f"{words.perplexity:.1f}", f"{_share(words, MIN_PERPLEXITY)}"),
        ("most frequent word", f"{words.top_share:.1%}",
         f"{MAX_TOP_SHARE:.0%} or less; above {MOST_COMMON:.0%} dead"),
    ]  # fmt: skip


def _share(words: TokenHealth, least: float) -> str:
    return f"{least * words.possible:.0f} or more of {words.possible} that can occur"


def _placement(view: str, place: str, found: Placement | None) -> list[Row]:
    if found is None:
        return []
    return [
        (f"{view}: {place}", f"{found.right:.1%}", "clearly more than the others"),
        (f"{view}: best of the others", f"{found.wrong:.1%}", "as much as neighbours look alike"),
    ]


def _drawn(drawn: Reconstruction | None) -> list[Row]:
    if drawn is None:
        return []
    return [
        ("redrawn: pixel MAE, 0..1", f"{drawn.mae:.4f}", f"{PUBLISHED_MAE} (on other images)"),
        ("redrawn: PSNR, dB", f"{drawn.psnr:.2f}", "more is better"),
        ("redrawn: SSIM", f"{drawn.ssim:.3f}", "1 is perfect"),
    ]
