"""Two sentences: what was shown, and what could have been. No winner without an interval.

What else has to be known to read them right comes after.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mimkit.ablation.comparison import Comparison
from mimkit.ablation.intervals import Interval
from mimkit.ablation.significance import MOST_SEEDS
from mimkit.ablation.wording import TITLES


@dataclass(frozen=True)
class Verdict:
    """`better` and `worse` than the reference, corrected for the number of arms."""

    sentences: tuple[str, ...]
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
    notes: Sequence[str] = (),
) -> Verdict:
    """
    Args:
        reference, control: each arm against the reference, and against the arm of equal FLOPs.
        notes: sentences that belong to it.
    """
    if not reference:
        nothing = "There is no verdict: no arm has finished runs beside the reference's."
        return Verdict((nothing, "The same command goes on with what is missing."), (), ())
    if all(one.corrected is None for one in reference):
        return Verdict((*_one_seed(TITLES[measure]), *notes), (), ())
    shown = [one for one in reference if one.shown]
    better = tuple(one.arm for one in shown if one.difference.interval.value > 0)
    worse = tuple(one.arm for one in shown if one.difference.interval.value < 0)
    say = _shown if shown else _none
    first = say(reference, TITLES[measure], confidence)
    notes = (*_without_interval([*reference, *control]), *notes)
    return Verdict((first, _second(better, reference, control), *notes), better, worse)


def _one_seed(title: str) -> tuple[str, str]:
    return (
        f"There is no verdict on {title} accuracy: with one seed, what a stem does cannot be told "
        "from what another seed would have done.",
        "Set seeds to three or more; finished runs are kept.",
    )


def _shown(reference: Sequence[Comparison], title: str, confidence: float) -> str:
    parts = [
        f"{one.arm} is {'better' if one.difference.interval.value > 0 else 'worse'} than "
        f"{one.against} by {points(one.corrected)}"
        for one in reference
        if one.shown
    ]
    return f"In {title} accuracy {'; '.join(parts)} ({_level(reference, confidence)})."


def _none(reference: Sequence[Comparison], title: str, confidence: float) -> str:
    who = "no arm is" if len(reference) > 1 else f"{reference[0].arm} is not"
    said = f"In {title} accuracy {who} shown to be better or worse than {reference[0].against}"
    judged = [one for one in reference if one.adjusted_p is not None]
    if not judged:
        return f"{said}: no difference has an interval."
    widest = max(judged, key=lambda one: abs(one.difference.interval.value))
    numbers = f"{points(widest.corrected)}; {_level(reference, confidence)}"
    if len(judged) == 1:
        return f"{said}: the interval of {widest.arm} holds zero ({numbers})."
    return (
        f"{said}: every interval holds zero, also that of the largest difference ({widest.arm}, "
        f"{numbers})."
    )


def _level(reference: Sequence[Comparison], confidence: float) -> str:
    many = len(reference) > 1
    return (f"{100 * confidence:g} % interval{'s' if many else ''}, paired by seed"
            f"{', corrected for the number of arms' if many else ''}")  # fmt: skip


def _without_interval(comparisons: Sequence[Comparison]) -> list[str]:
    """Which differences have none, beside others that do, and why."""
    alone = [one for one in comparisons if one.corrected is None]
    same = [one for one in comparisons if one.corrected is not None and one.adjusted_p is None]
    found = []
    if alone:
        found.append(f"Without an interval, with one pair of seeds: {_differences(alone)}.")
    if same:
        found.append("Without an interval, since all pairs of seeds differ by the same: "
                     f"{_differences(same)}. With few seeds that happens to equal stems too; take "
                     "more seeds.")  # fmt: skip
    return found


def _differences(comparisons: Sequence[Comparison]) -> str:
    return "; ".join(
        f"{one.arm} minus {one.against} {points(one.corrected or one.difference.interval)}"
        for one in comparisons
    )


def _second(
    better: Sequence[str], reference: Sequence[Comparison], control: Sequence[Comparison]
) -> str:
    by_name = {one.arm: one for one in control}
    if named := [by_name[arm] for arm in better if arm in by_name]:
        kept = [one for one in named if one.shown and one.difference.interval.value > 0]
        said = "; ".join(f"{one.arm} {points(one.corrected)}" for one in named)
        who = " and ".join(one.arm for one in kept) or "none of them"
        return (f"Better than the control {named[0].against} too, which spends a stem's FLOPs on "
                f"plain blocks, {'are' if len(kept) > 1 else 'is'} {who}: {said}.")  # fmt: skip
    return could_have_seen(reference)


def could_have_seen(comparisons: Sequence[Comparison]) -> str:
    """What the study was able to show at all."""
    able = [one for one in comparisons if one.smallest is not None]
    if not able:
        return "What it could have shown is not known: no difference has a spread."
    smallest = [one.smallest for one in able if one.smallest is not None]
    seeds = [one.seeds_for_paper for one in able if one.seeds_for_paper is not None]
    few, many = min(seeds), max(seeds)
    needed = f"{few} to {_count(many)}" if few != many else _count(few)
    least, most = f"{100 * min(smallest):.1f}", f"{100 * max(smallest):.1f}"
    wide = least if least == most else f"{least} to {most}"
    by_arm = "" if least == most else ", depending on the arm"
    pairs = " or ".join(map(str, sorted({one.difference.seeds for one in able})))
    return (
        f"With {pairs} seeds it could have shown, four times in five, a true difference of {wide} "
        f"points{by_arm}; one as small as the paper's +0.38 would take {needed} seeds."
    )


def _count(seeds: int) -> str:
    return f"more than {MOST_SEEDS}" if seeds >= MOST_SEEDS else str(seeds)


def points(interval: Interval | None) -> str:
    """`+0.38 [+0.10, +0.66] points`."""
    assert interval is not None
    value, low, high = (None if end is None else f"{100 * end:+.2f}" for end in interval)
    return f"{value} points" if low is None else f"{value} [{low}, {high}] points"
