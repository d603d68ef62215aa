"""Two sentences: what was shown, and what could have been. No winner without an interval."""

from collections.abc import Sequence
from dataclasses import dataclass

from mimkit.ablation.comparison import Comparison
from mimkit.ablation.intervals import Interval
from mimkit.ablation.significance import MOST_SEEDS
from mimkit.ablation.wording import TITLES


@dataclass(frozen=True)
class Verdict:
    """`better` and `worse` than the reference, corrected for the number of arms."""

    sentences: tuple[str, str]
    better: tuple[str, ...]
    worse: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.sentences)


def verdict(
    reference: Sequence[Comparison],
    control: Sequence[Comparison],
    *,
    measure: str,
    confidence: float,
) -> Verdict:
    """
    Args:
        reference, control: each arm against the reference, and against the arm of equal FLOPs.
    """
    if not reference:
        nothing = "There is no verdict: no arm has finished runs beside the reference's."
        return Verdict((nothing, "Run the study again to go on with what failed."), (), ())
    if all(one.corrected is None for one in reference):
        return Verdict(_one_seed(TITLES[measure]), (), ())
    shown = [one for one in reference if one.shown]
    better = tuple(one.arm for one in shown if one.difference.interval.value > 0)
    worse = tuple(one.arm for one in shown if one.difference.interval.value < 0)
    say = _shown if shown else _none
    first = say(shown or reference, TITLES[measure], confidence)
    return Verdict((first, _second(better, reference, control)), better, worse)


def _one_seed(title: str) -> tuple[str, str]:
    return (
        f"There is no verdict on {title} accuracy: with one seed, what a stem does cannot be told "
        "from what another seed would have done.",
        "Set seeds to three or more; finished runs are kept.",
    )


def _shown(shown: Sequence[Comparison], title: str, confidence: float) -> str:
    parts = [
        f"{one.arm} is {'better' if one.difference.interval.value > 0 else 'worse'} than "
        f"{one.against} by {points(one.corrected)}"
        for one in shown
    ]
    return f"In {title} accuracy {'; '.join(parts)} ({_level(confidence)})."


def _none(reference: Sequence[Comparison], title: str, confidence: float) -> str:
    best = max(reference, key=lambda one: one.difference.interval.value)
    return (
        f"In {title} accuracy no arm is shown to be better or worse than {best.against}: every "
        f"interval holds zero, also that of the highest mean ({best.arm}, "
        f"{points(best.corrected)}; {_level(confidence)})."
    )


def _level(confidence: float) -> str:
    return f"{100 * confidence:g} % intervals, paired by seed, corrected for the number of arms"


def _second(
    better: Sequence[str], reference: Sequence[Comparison], control: Sequence[Comparison]
) -> str:
    by_name = {one.arm: one for one in control}
    if named := [by_name[arm] for arm in better if arm in by_name]:
        kept = [one for one in named if one.shown and one.difference.interval.value > 0]
        said = "; ".join(f"{one.arm} {points(one.corrected)}" for one in named)
        who = " and ".join(one.arm for one in kept) or "none of them"
        return (f"Better than the control {named[0].against} too, which spends a stem's FLOPs on "
                f"plain blocks, is {who}: {said}.")  # fmt: skip
    return could_have_seen(reference)


def could_have_seen(comparisons: Sequence[Comparison]) -> str:
    """What the study was able to show at all."""
    able = [one for one in comparisons if one.smallest is not None]
    if not able:
        return "All differences are the same in every pair, so their spread says nothing."
    smallest = [one.smallest for one in able if one.smallest is not None]
    seeds = [one.seeds_for_paper for one in able if one.seeds_for_paper is not None]
    few, many = min(seeds), max(seeds)
    needed = f"{few} to {_count(many)}" if few != many else _count(few)
    least, most = f"{100 * min(smallest):.1f}", f"{100 * max(smallest):.1f}"
    wide = least if least == most else f"{least} to {most}"
    return (
        f"With {able[0].difference.seeds} seeds it could have shown, four times in five, a true "
        f"difference of {wide} points, depending on the arm; one as small as the paper's +0.38 "
        f"would take {needed} seeds."
    )


def _count(seeds: int) -> str:
    return f"more than {MOST_SEEDS}" if seeds >= MOST_SEEDS else str(seeds)


def points(interval: Interval | None) -> str:
    """`+0.38 [+0.10, +0.66] points`."""
    assert interval is not None
    value, low, high = (None if end is None else f"{100 * end:+.2f}" for end in interval)
    return f"{value} points" if low is None else f"{value} [{low}, {high}] points"
