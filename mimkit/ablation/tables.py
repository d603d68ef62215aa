"""The record of a study -> rows of text, the same for the HTML page, Markdown and CSV."""

from collections.abc import Mapping, Sequence
from typing import Any

from mimkit.ablation.chance import at_chance
from mimkit.ablation.significance import MOST_SEEDS
from mimkit.ablation.wording import TITLES
from mimkit.train.stopwatch import duration

Record = dict[str, Any]
Row = dict[str, str]
GFLOPS = (
    "GFLOPs (paper's rule)"  # a column of an image's forward pass; gflops_paper in CSV and JSON
)


def percent(interval: Sequence[float | None] | None, *, digits: int = 2) -> str:
    """`61.25 ±1.10`: mean and half of the interval, in %; empty without runs."""
    if interval is None:
        return ""
    value, low, high = interval
    assert value is not None
    half = "" if low is None or high is None else f" ±{100 * (high - low) / 2:.{digits}f}"
    return f"{100 * value:.{digits}f}{half}"


def signed(interval: Sequence[float | None] | None) -> str:
    """`+0.38 [+0.10, +0.66]` in points."""
    if interval is None:
        return ""
    value, low, high = (None if end is None else f"{100 * end:+.2f}" for end in interval)
    return f"{value}" if low is None else f"{value} [{low}, {high}]"


def main_table(record: Record) -> list[Row]:
    """The paper's Table 7: stem, GFLOPs, results; published values in columns of their own."""
    study = record["study"]
    rows = []
    for arm, found in record["arms"].items():
        row = {"arm": arm, "stem": _stem(found["stem"]),
               GFLOPS: _gflops(found["cost"])}  # fmt: skip
        for measure in record["measures"]:
            low = _at_chance(record, measure, found["by_seed"][measure])
            row[f"{TITLES[measure]}, %"] = percent(found["means"].get(measure)) + low
        for role in ("reference", "control"):
            if study[role] is not None:
                row[f"minus {study[role]}, points"] = _difference(record, arm, study[role])
        row |= _published(found["published"])
        rows.append(row)
    return rows


def _at_chance(record: Record, measure: str, accuracy: Mapping[Any, float]) -> str:
    seeds = at_chance(accuracy, record.get("most_common_class", {}).get(measure))
    return f" at chance {seeds}".removesuffix(" with every seed") if seeds else ""


def _gflops(cost: Record) -> str:
    """By the paper's rule, three digits."""
    return f"{cost['gflops_paper']:#.3g}".removesuffix(".")


def _stem(stem: dict[str, Any]) -> str:
    rest = {key: value for key, value in stem.items() if key != "name"}
    return " ".join([str(stem["name"]), *(f"{key}={value}" for key, value in rest.items())])


def _comparison(record: Record, measure: str, arm: str, against: str) -> Record | None:
    for one in record["comparisons"][measure]:
        if (one["arm"], one["against"]) == (arm, against):
            return dict(one)
    return None


def _difference(record: Record, arm: str, against: str) -> str:
    one = _comparison(record, record["study"]["primary"], arm, against)
    if one is None:
        return "" if arm != against else "-"
    star = " *" if one["shown"] else ""
    return signed(one["corrected"] or one["difference"]["interval"]) + star


def _published(row: Record | None) -> Row:
    if row is None:
        return {"paper GFLOPs": "", "paper supervised, %": "", "paper BeiT, %": ""}
    return {
        "paper GFLOPs": f"{row['gflops']:.2f}",
        "paper supervised, %": _spread(row["supervised"], row["supervised_std"]),
        "paper BeiT, %": _spread(row["beit"], row["beit_std"]),
    }


def _spread(value: float, std: float | None) -> str:
    return f"{value:.2f}" if std is None else f"{value:.2f} ±{std:.2f}"


def evidence_table(record: Record, measure: str) -> list[Row]:
    """Every comparison of a measure with all that was computed."""
    return [_evidence(one) for one in record["comparisons"][measure]]


def _evidence(one: Record) -> Row:
    difference, pairs = one["difference"], one["pairs"]
    needed = one["seeds_for_paper"]
    return {
        "arm": one["arm"],
        "minus": one["against"],
        "seeds": str(difference["seeds"]),
        "points": signed(difference["interval"]),
        "corrected": signed(one["corrected"]),
        "p (Holm)": "" if one["adjusted_p"] is None else f"{one['adjusted_p']:.3f}",
        "images too": signed(one["images"]),
        "McNemar p": ", ".join(f"{pair['p']:.3f}" for pair in pairs),
        "would see": "" if one["smallest"] is None else f"{100 * one['smallest']:.1f}",
        "seeds for +0.38": _seeds(needed),
    }


def _seeds(needed: int | None) -> str:
    if needed is None:
        return ""
    return f"over {MOST_SEEDS}" if needed >= MOST_SEEDS else str(needed)


def cost_table(record: Record) -> list[Row]:
    """Cost and leak of each arm."""
    rows = []
    for arm, found in record["arms"].items():
        cost, summary = found["cost"], found["summary"]
        rows.append({
            "arm": arm,
            "parameters, M": f"{cost['params'] / 1e6:.2f}",
            GFLOPS: _gflops(cost),
            "of them in the stem": f"{cost['stem_share']:.1%}",
            "training, ms an image": f"{cost['ms_train']:.1f}",
            "leak in training": _leak(summary, "train"),
            "leak in evaluation": _leak(summary, "eval"),
            "held-out loss, nats": _nats(summary.get("heldout_loss")),
        })  # fmt: skip
    return rows


def _leak(summary: Record, mode: str) -> str:
    moved = summary.get(f"leak_{mode}_visible_moved")
    by = summary.get(f"leak_{mode}_mean_relative")
    if moved is None or by is None:
        return ""
    return f"{moved[0]:.0%} of tokens by {by[0]:.1%}" if moved[0] else "none"


def _nats(interval: Sequence[float | None] | None) -> str:
    if interval is None:
        return ""
    value, low, high = interval
    assert value is not None
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ±{(high - low) / 2:.3f}"


def views_table(record: Record) -> list[Row]:
    """Training loss of every arm at equal steps, FLOPs and time."""
    titles = [_budget(view["budget"], view["amount"]) for view in record["views"]]
    return [
        {"arm": arm, **{title: _nats(view["loss"].get(arm))
                        for title, view in zip(titles, record["views"], strict=True)}}
        for arm in record["arms"] if record["views"]
    ]  # fmt: skip


def _budget(name: str, amount: float) -> str:
    if name == "steps":
        return f"equal steps: {amount:.0f}"
    if name == "flops":
        return f"equal FLOPs: {_flops(amount)}"
    return f"equal time: {duration(amount)} of a core"


def _flops(peta: float) -> str:
    units = ((1e3, "E"), (1, "P"), (1e-3, "T"))
    scale, unit = next((pair for pair in units if peta >= pair[0]), (1e-6, "G"))
    return f"{peta / scale:.3g} {unit}FLOPs"


def runs_table(record: Record) -> list[Row]:
    """Every run with its identity and where it is."""
    return [
        {
            "arm": run["arm"],
            "seed": str(run["seed"]),
            **{f"{TITLES[m]}, %": _of_run(record, run, m) for m in record["measures"]},
            "time, s": _spent(run["spent"], "wall"),
            "processor, s": _spent(run["spent"], "process"),
            "memory, MiB": _spent(run["spent"], "memory_mib"),
            "folder": run["folder"],
        }
        for run in record["runs"]
    ]  # fmt: skip


def _of_run(record: Record, run: Record, measure: str) -> str:
    accuracy = run["accuracy"].get(measure)
    if accuracy is None:
        return ""
    return percent([accuracy, None, None]) + _at_chance(record, measure, {run["seed"]: accuracy})


def _spent(spent: Record, what: str) -> str:
    """Of a job that was killed, only its time is known."""
    if what not in spent:
        return ""
    least = "over " if what != "wall" and spent.get("unmeasured") else ""
    return f"{least}{spent[what]:.0f}"
