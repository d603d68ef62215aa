"""Sentences of a report that say what its numbers are, and are not."""

from typing import Any

Record = dict[str, Any]


TITLES = {
    "knn": "kNN",
    "linear": "linear probe",
    "attentive": "attentive probe",
    "finetuning": "finetuning",
    "supervised": "supervised",
}
_MEASURED = {
    "knn": "an image of the held-out split gets the label of its nearest training images, by the "
    "features of the encoder as it was pretrained",
    "linear": "a linear classifier is trained on those features, the encoder stays as it is",
    "attentive": "a classifier that attends to the patches is trained, the encoder stays as it is",
    "finetuning": "the encoder and a classifier are trained on, with labels",
    "supervised": "the same architecture is trained with labels from scratch",
}


def setting_line(record: Record) -> str:
    """What was run, in a line."""
    study, seeds = record["study"], len(record["study"]["seeds"])
    finished = sum(bool(run["accuracy"]) for run in record["runs"])
    return (
        f"{len(record['arms'])} arms x {seeds} seed{'s' if seeds > 1 else ''}, {finished} of "
        f"{len(record['runs'])} runs finished; {' and '.join(study['regimes'])}; "
        f"{_budget(record)}; the verdict is about {TITLES[study['primary']]} accuracy on "
        "held-out images."
    )


_TRAINING = {"supervised": "supervised training"}
_BUDGETS = {"steps": "equal steps", "flops": "equal FLOPs", "time": "equal measured time"}


def _budget(record: Record) -> str:
    """What is equal, and in what."""
    study = record["study"]
    equal = _BUDGETS[study["budget"]]
    if study["budget"] == "steps":
        return equal
    if "steps" not in record:  # of an older mimkit
        return f"{equal} in pretraining alone"
    *first, last = (_TRAINING.get(regime, regime) for regime in _trained(record))
    if not first:
        return f"{equal} in {last}"
    return f"{equal} in {', '.join(first)} and {last}, each by itself"


def _trained(record: Record) -> list[str]:
    """Regimes with steps of a budget, of those that were run."""
    alone = set(record["study"]["regimes"]) <= {"supervised"}
    return [regime for regime in record["steps"] if regime != "pretraining" or not alone]


def legend(record: Record) -> list[str]:
    """Under the main table: what is ours, and what is the paper's."""
    study, paper = record["study"], record["paper"]
    level = f"{100 * study['confidence']:g} %"
    return [
        f"Accuracies in %: mean over seeds, ± half of the {level} t-interval. Differences are "
        f"paired by seed, in points of {TITLES[study['primary']]} accuracy, with the interval of "
        "Holm's correction for the number of arms; * where it excludes zero. Equal numbers have no "
        f"interval. {_at_chance(record)}FLOPs are counted as the paper does, here and in all that "
        "follows: a multiply-add once. Its rule for the forward pass of an image adds 5 for each "
        "normalised element, and its classifier.",
        "Columns that begin with 'paper' are of other data, another budget and another size: "
        f"{paper['setting']}; {paper['source']}; ± is its standard deviation over five runs. They "
        "can be compared with each other, not with ours.",
    ]


def _at_chance(record: Record) -> str:
    shares = record.get("most_common_class", {})
    if not shares:
        return ""
    said = ", ".join(f"{TITLES[m]} {100 * share:.2f} %" for m, share in shares.items())
    return ("At chance is what is right on no more images than the most common class has "
            f"({said}). ")  # fmt: skip


def evidence_terms(record: Record) -> list[tuple[str, str]]:
    """Each column of the evidence, and what it says."""
    level = f"{100 * record['study']['confidence']:g} %"
    return [
        ("points", f"mean difference, paired by seed, with the {level} t-interval of this one "
         "comparison"),
        ("corrected", "the same at the level of Holm's step, or of the step that stopped before; "
         "the verdict stands on it. None where all pairs differ by the same, nor a p: with few "
         "seeds that happens to equal stems too"),
        ("images too", "interval of a bootstrap over seeds and images; too narrow with few seeds"),
        ("McNemar p", "by seed; compares two trained models, not two stems: runs of one stem with "
         "two seeds differ too"),
        ("would see", "the true difference, in points, that as many seeds show four times in five"),
        ("seeds for +0.38", "how many would show the paper's difference four times in five"),
    ]  # fmt: skip


VIEWS_LEGEND = (
    "A curve that is cut had not ended: its learning rate would have come down in a run of that "
    "length. FLOPs of training are three times those of the forward pass, multiply-adds alone."
)
LEAK_LEGEND = (
    "Leak: how many visible tokens move, and by how much of their length, when only pixels under "
    "the mask change (on noise images)."
)


def spent_legend(record: Record) -> str:
    """Under the table of runs: what time, processor and memory are of."""
    if not any("jobs" in run["spent"] for run in record["runs"]):  # of an older mimkit
        return "Time, processor and memory are of the last attempt at a run's pretraining alone."
    return (
        "Time and processor are sums over all jobs of a run (pretraining with its probes, "
        "finetuning, supervised training) and all attempts at each, memory is the most of any; "
        "report.json has them by job. A pretraining that arms share is in the row of each. Of an "
        "attempt that was killed only the time is known: then the others read 'over'."
    )


def words(record: Record) -> list[tuple[str, str]]:
    """What somebody needs who has not read the paper."""
    study = record["study"]
    found = [
        ("stem", "the first layers of a vision transformer, that turn an image into one token a "
         "patch"),
        ("arm", "what is compared: a stem, or another change, with all else equal"),
        ("seed", "one repetition of all arms with the same images, crops, masks and equal initial "
         "weights; another seed draws others. How much the results move from seed to seed is what "
         "the intervals are made of"),
        (study["reference"], "the reference: every other arm is compared with it"),
    ]  # fmt: skip
    if study["control"] is not None:
        found.append((study["control"], "the control: spends a costly stem's FLOPs on something "
                      "plain, as a deeper encoder does"))  # fmt: skip
    found += [
        ("points", "percentage points of accuracy; an interval is written [low, high]"),
        *((f"{TITLES[measure]} accuracy", _MEASURED[measure]) for measure in record["measures"]),
    ]
    return found


def paired_lines(record: Record) -> list[str]:
    """What arms share, as it was found when their starts were built."""
    lines = [_paired(one, record["study"]["reference"]) for one in record["pairing"]]
    for arm, found in record["arms"].items():
        if found["differs"]:
            lines.append(f"{arm} declares what else differs: {'; '.join(found['differs'])}")
    for regime in _trained(record) if record.get("steps") else []:
        steps = ", ".join(f"{arm} {number}" for arm, number in record["steps"][regime].items())
        equal = f"{_BUDGETS[record['study']['budget']]} in {_TRAINING.get(regime, regime)}"
        lines.append(f"{equal} are these steps: {steps}")
    if (shared := record.get("view_seed")) is not None:
        lines.append(f"all seeds share the crops of seed {shared} (data.view_seed): the intervals "
                     "do not count that others might have been drawn")  # fmt: skip
    own = {arm: _facts(found.get("facts", {})) for arm, found in record["arms"].items()}
    others = [f"{arm} has its own: {facts}" for arm, facts in own.items() if facts]
    whose = f"data and tokenizer of {record['study']['reference']}" if others else (
        "one data set and one tokenizer in all runs")  # fmt: skip
    return [*lines, "; ".join([f"{whose}: {_facts(record['facts'])}", *others])]


def _facts(facts: Record) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items() if value)


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
