"""Steps of every arm in every regime where FLOPs or time are equal, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mimkit import build
from mimkit.ablation import prices
from mimkit.ablation.budgets import ArmCost, Costs, equal_steps
from mimkit.ablation.classifiers import classifier_config
from mimkit.ablation.plan import Plan, make_plan
from mimkit.ablation.prices import budget_steps, study_costs
from mimkit.ablation.wording import paired_lines, setting_line
from mimkit.audit.cost import cost
from mimkit.config import Config, load_study_config
from mimkit.errors import UserError

FINETUNING = "finetuning={base: finetune_small, settings: {train: {steps: 30, epochs: null}}}"
SUPERVISED = ("supervised={base: finetune_small, settings: {train: {epochs: 3, batch_size: 32}, "
              "data: {image_size: 48}}}")  # fmt: skip
REGIMES = ["regimes=[finetuning,supervised]", "primary=finetuning", "seeds=[0]",
           "settings.train.steps=40", "budget=flops", FINETUNING, SUPERVISED]  # fmt: skip


def _plan(study: Path, folder: Path, *overrides: str) -> Plan:
    return make_plan(load_study_config(study, [*REGIMES, f"folder={folder}", *overrides]))


def _silent(text: str) -> None:
    pass


def _flops(config: Config, side: int) -> float:
    data = config.data.model_copy(update={"image_size": side})
    with torch.device("meta"):
        model = build.build_model(config.model_copy(update={"data": data}), prediction_dim=2)
    return cost(model.image_encoder, stem="", name="").gflops


def test_steps_cost_what_the_references_do() -> None:
    found = equal_steps({"a": 2.0, "b": 3.0, "c": 5000.0}, reference="a", steps=60)
    assert found == {"a": 60, "b": 40, "c": 1}


def test_flops_are_equal_in_every_regime_at_its_own_size_of_image(
    tiny_study: Path, tmp_path: Path
) -> None:
    plan = _plan(tiny_study, tmp_path)
    costs = study_costs(plan.study, plan.arms, say=_silent)
    steps = budget_steps(plan, costs.of, say=_silent)
    assert steps is not None
    for regime, side, own in (("pretraining", 32, 40), ("finetuning", 32, 30),
                              ("supervised", 48, round(3 * 96 / 32))):  # fmt: skip
        spent = {arm: steps[regime][arm] * _flops(config, side)
                 for arm, config in plan.arms.items()}  # fmt: skip
        assert steps[regime]["linear"] == own and steps[regime]["two_blocks"] < own
        for arm, amount in spent.items():
            half_a_step = _flops(plan.arms[arm], side) / 2
            assert abs(amount - spent["linear"]) <= half_a_step * 1.001, (regime, arm)
    final = make_plan(plan.study, steps=steps)
    assert final.steps == steps
    for run in final.runs:
        assert run.config.train.steps == steps["pretraining"][run.arm]
        for regime in ("finetuning", "supervised"):
            train = classifier_config(plan.study, run, regime).train  # type: ignore[arg-type]
            assert (train.steps, train.epochs) == (steps[regime][run.arm], None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["arms.hmlp.classifier.train.roles=[attention]"],
         r"finetuning has train\.roles=\['attention'\], whose backward pass costs less"),
        (["finetuning.settings.data.image_size=[32,48]"], r"finetuning has data\.image_size="),
        (["arms.hmlp.classifier.train={steps: 9, epochs: null}"],
         r"arms\.hmlp\.classifier gives train\.steps, but budget=flops"),
        (["arms.hmlp.settings.train.steps=9"], r"arms\.hmlp\.settings gives train\.steps"),
    ],
)  # fmt: skip
def test_what_no_steps_can_make_equal_is_refused(
    overrides: list[str], message: str, tiny_study: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        plan = _plan(tiny_study, tmp_path, *overrides)
        costs = {arm: ArmCost(1, 1.0, 1.0, 0.1, 1.0, 3.0) for arm in plan.arms}
        budget_steps(plan, costs, say=_silent)


def test_a_larger_batch_is_a_dearer_step(tiny_study: Path, tmp_path: Path) -> None:
    plan = _plan(tiny_study, tmp_path, "regimes=[probes]", "primary=knn", "finetuning=null",
                 "supervised=null", "arms.hmlp.settings.train.batch_size=16",
                 "arms.hmlp.declares=[train.batch_size]")  # fmt: skip
    costs = {arm: ArmCost(1, 1.0, 1.0, 0.1, 1.0, 3.0) for arm in plan.arms}
    assert budget_steps(plan, costs, say=_silent) == {
        "pretraining": {"linear": 40, "two_blocks": 40, "hmlp": 20}
    }


def test_arms_that_come_later_leave_what_was_measured_and_are_scaled_to_it(
    tiny_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is twice as slow by then."""
    slow, timed = [1.0], list[list[str]]()

    def measured(arms: dict[str, Config], *, say: Callable[[str], object]) -> Costs:
        timed.append(list(arms))
        took = {"linear": 3.0, "two_blocks": 6.0, "hmlp": 4.5}
        return Costs({arm: ArmCost(1, 1.0, 1.0, 0.1, slow[0], slow[0] * took[arm])
                      for arm in arms}, {})  # fmt: skip

    monkeypatch.setattr(prices, "arm_costs", measured)
    few = _plan(tiny_study, tmp_path, "arms.hmlp=null")
    first = study_costs(few.study, few.arms, say=_silent).of
    slow[0] = 2.0
    plan = _plan(tiny_study, tmp_path)
    found = study_costs(plan.study, plan.arms, say=_silent).of
    assert timed == [["linear", "two_blocks"], ["linear", "hmlp"]]
    assert {arm: found[arm] for arm in first} == first
    assert found["hmlp"].ms_train == pytest.approx(4.5)
    assert len(json.loads((tmp_path / "costs.json").read_text())) == 3


def test_the_report_says_in_what_a_budget_is_equal(tiny_study: Path) -> None:
    record: dict[str, Any] = {
        "study": load_study_config(tiny_study, REGIMES).model_dump(mode="json"),
        "arms": {"linear": {"differs": []}, "hmlp": {"differs": []}}, "runs": [], "facts": {},
        "steps": {"pretraining": {"linear": 40, "hmlp": 38}, "finetuning": {"linear": 30}},
        "pairing": [],
    }  # fmt: skip
    assert "equal FLOPs in pretraining and finetuning, each by itself;" in setting_line(record)
    assert "equal FLOPs in pretraining are these steps: linear 40, hmlp 38" in paired_lines(record)
    del record["steps"]  # of an older mimkit
    assert "equal FLOPs in pretraining alone;" in setting_line(record)
    record["study"]["budget"] = "steps"
    assert "; equal steps; the verdict" in setting_line(record)
