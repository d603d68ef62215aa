"""Two reports side by side: what differs in how they were made, and in what they found."""

from typing import Any

from mimkit.ablation.tables import percent, signed
from mimkit.config import differences

Record = dict[str, Any]


def compare_reports(one: Record, other: Record) -> str:
    """Markdown. Differences between studies are shown, not tested: their runs are not paired."""
    return "\n".join([
        f"# {one['name']} and {other['name']}",
        "",
        f"- first: {' '.join(one['verdict']['sentences'])}",
        f"- second: {' '.join(other['verdict']['sentences'])}",
        "",
        "## What differs in how they were made",
        "",
        *(f"- {line}" for line in _made(one, other) or ["nothing"]),
        "",
        "## What they found",
        "",
        *_table(one, other),
    ])  # fmt: skip


def _made(one: Record, other: Record) -> list[str]:
    first, second = (
        {**record["study"], "facts": record["facts"], "mimkit": record["mimkit"]}
        for record in (one, other)
    )
    return differences(first, second)


def _table(one: Record, other: Record) -> list[str]:
    measures = [m for m in one["measures"] if m in other["measures"]]
    if not measures:
        return ["They measure nothing in common."]
    arms = list(dict.fromkeys([*one["arms"], *other["arms"]]))
    lines = ["| measure | arm | first | second | first, minus reference | second |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for measure in measures:
        for arm in arms:
            cells = [_mean(record, arm, measure) for record in (one, other)]
            cells += [_minus(record, arm, measure) for record in (one, other)]
            lines.append(f"| {measure} | {arm} | {' | '.join(cells)} |")
    return lines


def _mean(record: Record, arm: str, measure: str) -> str:
    found = record["arms"].get(arm)
    return "no such arm" if found is None else percent(found["means"].get(measure))


def _minus(record: Record, arm: str, measure: str) -> str:
    for one in record["comparisons"][measure]:
        if (one["arm"], one["against"]) == (arm, record["study"]["reference"]):
            return signed(one["corrected"] or one["difference"]["interval"])
    return ""
