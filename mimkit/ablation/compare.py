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
    """Settings as they were resolved; as they were given, for a report that has no others."""
    resolved = all("settings" in record for record in (one, other))
    first, second = (_settings(record, resolved=resolved) for record in (one, other))
    note = "(settings are as they were given over those of `pretraining`; None: not given there)"
    lines = [*differences(first, second), *_arms(one, other)]
    return [note, *lines] if lines and not resolved else lines


def _settings(record: Record, *, resolved: bool) -> Record:
    study = {key: value for key, value in record["study"].items() if key != "arms"}
    if resolved:
        study |= {"settings": record["settings"]}
    return {**study, "steps": record.get("steps", {}), "facts": record["facts"],
            "mimkit": record["mimkit"]}  # fmt: skip


def _arms(one: Record, other: Record) -> list[str]:
    lines = []
    for arm in _all_arms(one, other):
        if arm not in one["arms"] or arm not in other["arms"]:
            lines.append(f"arm {arm}: in the {'first' if arm in one['arms'] else 'second'} only")
        else:
            first, second = ({key: record["arms"][arm].get(key, {})
                              for key in ("stem", "differs", "facts")}
                             for record in (one, other))  # fmt: skip
            lines += differences(first, second, f"arms.{arm}.")
    return lines


def _all_arms(one: Record, other: Record) -> list[str]:
    return list(dict.fromkeys([*one["arms"], *other["arms"]]))


def _table(one: Record, other: Record) -> list[str]:
    """Every measure and arm that either has."""
    titles = ["measure", "arm", "first", "second"]
    titles += [f"{which}, minus {record['study']['reference']}"
               for which, record in (("first", one), ("second", other))]  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for measure in dict.fromkeys([*one["measures"], *other["measures"]]):
        for arm in _all_arms(one, other):
            cells = [_mean(record, arm, measure) for record in (one, other)]
            cells += [_minus(record, arm, measure) for record in (one, other)]
            lines.append(f"| {measure} | {arm} | {' | '.join(cells)} |")
    return lines


def _mean(record: Record, arm: str, measure: str) -> str:
    if measure not in record["measures"]:
        return "not measured"
    found = record["arms"].get(arm)
    return "no such arm" if found is None else percent(found["means"].get(measure))


def _minus(record: Record, arm: str, measure: str) -> str:
    for one in record["comparisons"].get(measure, []):
        if (one["arm"], one["against"]) == (arm, record["study"]["reference"]):
            return signed(one["corrected"] or one["difference"]["interval"])
    return ""
