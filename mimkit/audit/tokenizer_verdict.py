"""What the measured health of a tokenizer means, in sentences."""

import math

from mimkit.audit.tokenizer import Placement, TokenizerHealth
from mimkit.errors import UserError
from mimkit.tokenizers._dvae_health import collapse_reasons

# Limits, ours. On training views of the default job the embedded tokenizer has 5.3 nats and a top
# share of 3 %; fed with views that were divided by 255 twice, 0.7 nats and 66 %.
MOST_COMMON = 0.9  # share of all tokens
LEAST_ENTROPY = 1.0  # nats, or a quarter of ln V where that is less
LEAST_SPREAD = 0.01  # of targets that are numbers, relative to their root mean square
# Disagreement at the right place relative to the best wrong one; embedded: 0.12.
MOST_MISPLACED = 0.8


def verdict(health: TokenizerHealth) -> tuple[str, str | None]:
    """`dead`, `misplaced`, `poor` or `healthy`, and why."""
    for word, judge in (("dead", dead), ("misplaced", misplaced), ("poor", poor)):
        if reason := judge(health):
            return word, reason
    return "healthy", None


def dead(health: TokenizerHealth) -> str | None:
    """Why its targets are as good as constant; None if they are not."""
    tokens = f"{health.images * math.prod(health.grid):,} patches of {health.images} views"
    if health.words is not None:
        words, least = health.words, least_entropy(health.words.vocabulary)
        if words.top_share > MOST_COMMON or words.entropy < least:
            return (
                f"one word takes {words.top_share:.1%} of {tokens}, and their entropy is "
                f"{words.entropy:.2f} nats; expected are at most {MOST_COMMON:.0%} and at least "
                f"{least:.2f}"
            )
    elif health.spread is not None and health.spread < LEAST_SPREAD:
        return (
            f"the targets of {tokens} differ by {health.spread:.2%} of their size; expected is "
            f"{LEAST_SPREAD:.0%} or more"
        )
    return None


def least_entropy(vocabulary: int) -> float:
    """Nats below which words are as good as constant."""
    return min(LEAST_ENTROPY, math.log(vocabulary) / 4)


def misplaced(health: TokenizerHealth) -> str | None:
    """Why targets and the encoder's patches do not belong together; None if they do."""
    if (crop := health.same_crop) is not None and not is_clear(crop):
        return (
            f"token view and encoder's view agree in {crop.right:.1%} of the patches, but in "
            f"{crop.wrong:.1%} with a neighbour: they do not show the same crop"
        )
    if (crop := health.moved_crop) is not None and not is_clear(crop):
        return (
            f"a view moved one patch to the right agrees in {crop.right:.1%} with the patch to the "
            f"right, but in {crop.wrong:.1%} with another: targets do not stand row by row, or do "
            "not depend on their patch"
        )
    return None


def is_clear(placement: Placement) -> bool:
    """Whether the right place is clearly the best one."""
    return 1 - placement.right <= MOST_MISPLACED * (1 - placement.wrong)


def poor(health: TokenizerHealth) -> str | None:
    """Why its words carry little; None if they carry enough, or are numbers."""
    reasons = [] if health.words is None else collapse_reasons(health.words)
    return "; ".join(reasons) or None


def stop_if_dead(health: TokenizerHealth) -> None:
    """UserError with what was found, and the likely causes."""
    reason = dead(health)
    if reason is not None:
        raise UserError(
            f"tokenizer '{health.tokenizer}' gives nearly the same target everywhere: {reason}. "
            "A model would learn that constant, and its loss would look excellent. Likely causes: "
            "pixels mapped twice, or views that are not in [0, 1] (divided by 255 twice, "
            "normalised; a tokenizer gets [0, 1] and maps pixels itself); weights that collapsed "
            "in training; images that show nothing. See it with tools/audit.py tokenizer --picture "
            "DIR, and set tokenizer.name and tokenizer.path to one that is alive"
        )


def say(health: TokenizerHealth) -> str:
    """The short form for a person, two lines, and a third one where something is wrong."""
    lines = [f"tokenizer: {_use(health)}", f"  {_firmness(health)}"]
    if trouble := misplaced(health) or poor(health):
        lines.append(f"warning: tokenizer: {trouble} (tools/audit.py tokenizer tells more)")
    return "\n".join(lines)


def _use(health: TokenizerHealth) -> str:
    if health.words is None:
        return f"numbers, on {health.images} training views they spread by {health.spread:.0%}"
    words = health.words
    return (
        f"{health.images} training views use {words.codes_used} of {words.vocabulary} words, "
        f"entropy {words.entropy:.2f} nats (ln V {math.log(words.vocabulary):.2f}), the most "
        f"frequent one {words.top_share:.1%}"
    )


def _firmness(health: TokenizerHealth) -> str:
    firm = (
        f"of its targets {health.stable_shift:.0%} stay when a view moves by a pixel, "
        f"{health.stable_jpeg75:.0%} as JPEG 75"
    )
    if health.same_crop is None:
        return firm
    return (
        f"{firm}, {health.same_crop.right:.0%} are those of the encoder's view, "
        f"{health.same_crop.wrong:.0%} those of a neighbour"
    )


def numbers(health: TokenizerHealth) -> dict[str, float]:
    """What goes into the summary of a run, by the names it has there."""
    found: dict[str, float | None] = {
        "tokenizer_spread": health.spread,
        "tokenizer_stable_shift": health.stable_shift,
        "tokenizer_stable_jpeg75": health.stable_jpeg75,
    }
    if (words := health.words) is not None:
        found |= {"tokenizer_used": words.codes_used, "tokenizer_entropy": words.entropy,
                  "tokenizer_top_share": words.top_share}  # fmt: skip
    if (crop := health.same_crop) is not None:
        found |= {"tokenizer_agreement": crop.right, "tokenizer_neighbour_agreement": crop.wrong}
    return {name: value for name, value in found.items() if value is not None}
