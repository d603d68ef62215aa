"""What the runs of a study left: accuracies, hits on each image, curves, costs, facts."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from mimkit.ablation.chance import most_common_share
from mimkit.ablation.classifiers import CLASSIFIERS, classifier_config, classifier_predictions
from mimkit.ablation.comparison import Scores
from mimkit.ablation.plan import Plan, Run
from mimkit.ablation.runner import probing_of, spent_on
from mimkit.ablation.spent import together
from mimkit.downstream.predictions import Predictions
from mimkit.errors import UserError

# by arm and seed, then by measure; arms that share a pretraining may be finetuned in other ways
_Found = dict[tuple[str, int], dict[str, Predictions]]


@dataclass(frozen=True)
class RunResult:
    """One run as far as it came.

    Attributes:
        accuracy: by measure: knn, linear, attentive, finetuning, supervised.
        chosen: what each probe chose on images held out of the training split.
        curve: (step, mean loss since the step before), of training.
        heldout: (step, held-out loss).
        summary: the run's own, empty where it is not finished.
        facts: digests, versions, git state.
        spent: seconds of wall and processor, MiB, of all its jobs and their attempts; and of each
            job; empty where none has ended.
    """

    arm: str
    seed: int
    identity: str
    folder: str
    accuracy: dict[str, float]
    chosen: dict[str, dict[str, Any]]
    curve: list[tuple[int, float]]
    heldout: list[tuple[int, float]]
    summary: dict[str, Any]
    facts: dict[str, Any]
    spent: dict[str, Any]
    stem: dict[str, Any]


def collect(plan: Plan) -> tuple[list[RunResult], dict[str, dict[str, Scores]], dict[str, float]]:
    """Every run; the scores by measure and arm; by measure, the share of the most common class.

    Raises:
        UserError: runs of a seed were judged on other images.
    """
    found = {(run.arm, run.seed): _predictions(plan, run) for run in plan.runs}
    results = [_result(plan, run, found[run.arm, run.seed]) for run in plan.runs]
    scores: dict[str, dict[str, Scores]] = {}
    shares: dict[str, float] = {}
    for measure in plan.study.measures:
        judged = _on_the_same_images(plan, measure, found)
        if judged:
            shares[measure] = most_common_share(judged[0])
        scores[measure] = {arm: _scores(plan, arm, measure, found) for arm in plan.arms}
    return results, scores, shares


def _predictions(plan: Plan, run: Run) -> dict[str, Predictions]:
    found: dict[str, Predictions | None] = {}
    if (probing := probing_of(plan.study)) is not None and run.finished:
        found |= {probe: probing.predictions(run.folder, probe) for probe in probing.probes}
    for regime in CLASSIFIERS:
        if regime in plan.study.regimes:
            config = classifier_config(plan.study, run, regime)
            found[regime] = classifier_predictions(config)
    return {name: predictions for name, predictions in found.items() if predictions is not None}


def _on_the_same_images(plan: Plan, measure: str, found: _Found) -> list[Predictions]:
    """Of every run that has them; UserError where they are of other images."""
    those = [(run, found[run.arm, run.seed][measure]) for run in plan.runs
             if measure in found[run.arm, run.seed]]  # fmt: skip
    for run, one in those[1:]:
        first = those[0][1]
        same = torch.equal(one.index_B, first.index_B) and torch.equal(one.label_B, first.label_B)
        if one.source != first.source or not same:
            raise UserError(
                f"{measure} of {run.folder} was measured on other images than that of "
                f"{those[0][0].folder}; delete the older of both and run the study again"
            )
    return [one for _, one in those]


def _scores(plan: Plan, arm: str, measure: str, found: _Found) -> Scores:
    hits = {
        run.seed: found[arm, run.seed][measure].correct.numpy()
        for run in plan.of(arm)
        if measure in found[arm, run.seed]
    }
    return Scores({seed: float(hit.mean()) for seed, hit in hits.items()}, hits)


def _result(plan: Plan, run: Run, predictions: dict[str, Predictions]) -> RunResult:
    metrics = _lines(run.folder / "metrics.jsonl")
    probing = probing_of(plan.study)
    chosen = {} if probing is None else {
        probe: _json(probing.folder(run.folder) / f"{probe}.json") for probe in probing.probes
    }  # fmt: skip
    return RunResult(
        arm=run.arm,
        seed=run.seed,
        identity=run.identity,
        folder=str(run.folder.relative_to(plan.folder)),
        accuracy={name: float(one.correct.double().mean()) for name, one in predictions.items()},
        chosen=chosen,
        curve=[(m["step"], m["loss"]) for m in metrics if m["kind"] == "train"],
        heldout=[(m["step"], m["heldout_loss"]) for m in metrics if m["kind"] == "heldout"],
        summary=_json(run.folder / "summary.json"),
        facts=_facts(run.folder / "run.json"),
        spent=_spent(plan, run),
        stem=_stem(run.folder / "config.yaml") or run.config.stem.model_dump(),
    )


def _spent(plan: Plan, run: Run) -> dict[str, Any]:
    jobs = spent_on(plan, run)
    if not jobs:
        return {}
    return asdict(together(jobs.values())) | {"jobs": {k: asdict(one) for k, one in jobs.items()}}


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _facts(path: Path) -> dict[str, Any]:
    """Without the command: inside a study it is the study's, with paths of this machine."""
    return {key: value for key, value in _json(path).items() if key != "command"}


def _stem(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))["stem"])


def _lines(path: Path) -> list[dict[str, Any]]:
    """Of a run that is being written, whole lines only."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
