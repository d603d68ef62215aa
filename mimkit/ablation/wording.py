"""Sentences of a report that say what its numbers are, and are not."""

from typing import Any

Record = dict[str, Any]


def setting_line(record: Record) -> str:
    """What was run, in a line."""
    study, seeds = record["study"], len(record["study"]["seeds"])
    finished = sum(bool(run["accuracy"]) for run in record["runs"])
    budget = {"steps": "equal steps", "flops": "equal FLOPs", "time": "equal measured time"}
    return (
        f"{len(record['arms'])} arms x {seeds} seed{'s' if seeds > 1 else ''}, {finished} of "
        f"{len(record['runs'])} runs finished; {' and '.join(study['regimes'])}; "
        f"{budget[study['budget']]}; the verdict is about {study['primary']} accuracy on held-out "
        "images."
    )


def legend(record: Record) -> str:
    """Under the main table."""
    study, paper = record["study"], record["paper"]
    level = f"{100 * study['confidence']:g} %"
    return (
        f"Accuracies: mean over seeds, ± half of the {level} t-interval. Differences are paired by "
        f"seed, in points of {study['primary']} accuracy, with the interval of Holm's correction "
        "for the number of arms; * where it excludes zero. GFLOPs by the paper's rule (a "
        "multiply-add once, 5 a normalised element). Columns in italics are the paper's: other "
        f"data, other budget, other size ({paper['setting']}; {paper['source']}); ± is its "
        "standard deviation over five runs. They can be compared with each other, not with ours."
    )


def evidence_legend(record: Record) -> str:
    level = f"{100 * record['study']['confidence']:g} %"
    return (
        f"points: paired {level} t-interval of one comparison; corrected: at the level of Holm's "
        "step. images too: bootstrap over seeds and images, too narrow with few seeds. McNemar "
        "compares two trained models, not two stems: runs of one stem with two seeds differ too. "
        "would see: the true difference in points that this many seeds show four times in five; "
        "seeds for +0.38: how many would show the paper's."
    )


def paired_lines(record: Record) -> list[str]:
    """What arms share, as it was found when their starts were built."""
    lines = [_paired(one, record["study"]["reference"]) for one in record["pairing"]]
    for arm, found in record["arms"].items():
        if found["differs"]:
            lines.append(f"{arm} declares what else differs: {'; '.join(found['differs'])}")
    if (shared := record.get("view_seed")) is not None:
        lines.append(f"all seeds share the crops of seed {shared} (data.view_seed): the intervals "
                     "do not count that others might have been drawn")  # fmt: skip
    facts = ", ".join(f"{key} {value}" for key, value in record["facts"].items() if value)
    return [*lines, f"one data set and one tokenizer in all runs: {facts}"]


def _paired(one: Record, reference: str) -> str:
    text = (
        f"{one['arm']} and {reference}: same {', '.join(one['equal'])}; {one['weights_equal']} of "
        f"{one['weights_alike']} initial tensors of equal name and shape are equal, "
        f"{len(one['weights_other'])} have no counterpart"
    )
    return text + (f"; different: {', '.join(one['different'])}" if one["different"] else "")


def repeat_lines(record: Record) -> list[str]:
    """Commands and versions."""
    finished = [run for run in record["runs"] if run["facts"]]
    lines = [
        f"python tools/ablate_stems.py --config STUDY/study.yaml (mimkit {record['mimkit']})",
        "one run: deepspeed tools/pretrain.py --config RUN/config.yaml output.dir=NEW",
    ]
    if finished:
        facts = finished[0]["facts"]
        git = facts.get("git") or {}
        changed = ", changed" if git.get("changed") else ""
        lines.append(f"git {git.get('commit', 'unknown')}{changed}; {facts.get('machine', '')}")
        lines.append(", ".join(f"{k} {v}" for k, v in facts.get("versions", {}).items()))
    return lines
