"""Everything a report says, as one record: what JSON holds, and what the pages are drawn from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mimkit import __version__
from mimkit.ablation.budgets import ArmCost
from mimkit.ablation.chance import chance_sentences
from mimkit.ablation.comparison import Comparison, Scores, compare
from mimkit.ablation.intervals import mean_interval
from mimkit.ablation.pairing import Pairing
from mimkit.ablation.plan import Plan
from mimkit.ablation.published import SETTING, SOURCE, published
from mimkit.ablation.results import RunResult, collect
from mimkit.ablation.runner import Failure
from mimkit.ablation.verdict import verdict
from mimkit.ablation.views import budget_views
from mimkit.config import Config, Settings, science_of
from mimkit.errors import UserError
from mimkit.files import write_text

FORMAT = "mimkit.study.1"
Record = dict[str, Any]


def make_record(
    plan: Plan,
    costs: Mapping[str, ArmCost],
    pairing: Sequence[Pairing],
    failures: Sequence[Failure],
) -> Record:
    """Compares what is finished.

    Raises:
        UserError: see `collect`; the extra `report` is not installed.
    """
    study = plan.study
    results, scores, shares = collect(plan)
    compared = {measure: _compared(plan, scores[measure]) for measure in study.measures}
    found = verdict(
        *compared[study.primary], measure=study.primary, confidence=study.confidence,
        notes=chance_sentences(scores[study.primary], shares.get(study.primary)),
    )  # fmt: skip
    return {
        "format": FORMAT,
        "mimkit": __version__,
        "name": study.name,
        "title": study.title,
        "study": study.model_dump(mode="json"),
        "measures": study.measures,
        "most_common_class": shares,
        "settings": _without_seed(plan.arms[study.reference]),
        "verdict": {"sentences": list(found.sentences), "better": list(found.better),
                    "worse": list(found.worse)},
        "arms": {arm: _arm(plan, arm, costs[arm], results, scores) for arm in plan.arms},
        "comparisons": {m: [_comparison(one) for part in parts for one in part]
                        for m, parts in compared.items()},
        "views": [asdict(view) for view in _views(plan, costs, results)],
        "pairing": [one.record() for one in pairing],
        "facts": plan.facts,
        "steps": plan.steps,
        "view_seed": plan.arms[study.reference].data.view_seed,
        "failures": [{"arm": one.arm, "seed": one.seed, "what": one.what,
                      "error": one.error, "log": str(one.log.relative_to(plan.folder))}
                     for one in failures],
        "missing": [
            *([one.arm, one.seed] for one in results if not _whole(plan, one)),
            *([one.arm, seed] for one in failures if one.seed is None for seed in study.seeds),
        ],
        "runs": [asdict(one) for one in results],
        "paper": {"source": SOURCE, "setting": SETTING},
    }  # fmt: skip


def _without_seed(config: Config) -> Record:
    """What decides the numbers of the reference's runs, its seeds apart."""
    return {key: value for key, value in science_of(config).items() if key not in ("name", "seed")}


def _whole(plan: Plan, one: RunResult) -> bool:
    return all(measure in one.accuracy for measure in plan.study.measures)


def _compared(
    plan: Plan, scores: Mapping[str, Scores]
) -> tuple[list[Comparison], list[Comparison]]:
    """Against the reference, and against the control."""
    study = plan.study
    reference = compare(scores, against=study.reference, confidence=study.confidence)
    if study.control is None:
        return reference, []
    return reference, compare(scores, against=study.control, confidence=study.confidence)


def _comparison(one: Comparison) -> Record:
    return asdict(one) | {"pairs": [pair._asdict() for pair in one.pairs]}


def _arm(
    plan: Plan,
    arm: str,
    cost: ArmCost,
    results: Sequence[RunResult],
    scores: Mapping[str, Mapping[str, Scores]],
) -> Record:
    confidence, config = plan.study.confidence, plan.study.present_arms[arm]
    means = {
        measure: mean_interval(np.array(list(found[arm].accuracy.values())), confidence=confidence)
        for measure, found in scores.items()
        if found[arm].accuracy
    }
    summaries = [one.summary for one in results if one.arm == arm and one.summary]
    return {
        "stem": plan.arms[arm].stem.model_dump(mode="json"),
        "differs": plan.confounds[arm],
        "facts": _own_facts(plan, arm),
        "paper_row": config.paper,
        "published": published(config.paper)._asdict() if config.paper else None,
        "cost": _cost(cost),
        "means": means,
        "by_seed": {measure: found[arm].accuracy for measure, found in scores.items()},
        "summary": {key: _mean(summaries, key, confidence) for key in _SUMMARISED
                    if any(isinstance(one.get(key), int | float) for one in summaries)},
    }  # fmt: skip


def _cost(cost: ArmCost) -> Record:
    """With torch's count as 1e9 multiply-adds: GFLOPs in a report are the paper's."""
    found: Record = cost.record()
    return {"gmacs": found.pop("gflops") / 2, **found}


def _own_facts(plan: Plan, arm: str) -> dict[str, str | None]:
    """Digests of data and tokenizer where they are others than the reference's."""
    mine = plan.of(arm)[0].opened.facts
    return {key: value for key, value in mine.items() if value != plan.facts[key]}


_SUMMARISED = ("heldout_loss", "heldout_accuracy", "unigram_entropy", "position_loss",
               "leak_train_visible_moved", "leak_train_mean_relative", "leak_eval_visible_moved",
               "leak_eval_mean_relative", "images_per_second")  # fmt: skip


def _mean(summaries: Sequence[Settings], key: str, confidence: float) -> Any:
    values = [one[key] for one in summaries if isinstance(one.get(key), int | float)]
    return mean_interval(np.array(values, float), confidence=confidence)


def _views(plan: Plan, costs: Mapping[str, ArmCost], results: Sequence[RunResult]) -> Sequence[Any]:
    curves = {arm: [one.curve for one in results if one.arm == arm] for arm in plan.arms}
    batch = next(iter(plan.arms.values())).train.batch_size
    prices = {
        "steps": dict.fromkeys(plan.arms, 1.0),
        "flops": {arm: 3e-6 * batch * cost.gflops / 2 for arm, cost in costs.items()},
        "time": {arm: 1e-3 * batch * cost.ms_train for arm, cost in costs.items()},
    }
    return budget_views(curves, prices, confidence=plan.study.confidence)


def save_record(record: Record, path: Path) -> None:
    write_text(path, json.dumps(record, indent=1, allow_nan=False))


def load_record(path: Path) -> Record:
    """A study's folder, its report's folder, or report.json.

    Raises:
        UserError: there is none there, or it is something else.
    """
    for file in (path, path / "report.json", path / "report" / "report.json"):
        if file.is_file():
            break
    else:
        raise UserError(f"there is no report in {path}; give the folder of a study, or report.json")
    try:
        record: Record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is no report: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{file} is no report of this mimkit: its format is not {FORMAT}")
    return record
