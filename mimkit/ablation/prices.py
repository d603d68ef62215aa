"""What a step costs in every arm and regime, and the steps that a budget of FLOPs or time gives."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from mimkit import build
from mimkit.ablation.budgets import ArmCost, Costs, arm_costs, equal_steps
from mimkit.ablation.classifiers import CLASSIFIERS, ClassifierRegime, classifier_config
from mimkit.ablation.plan import Plan, Steps, study_folder
from mimkit.config import Config, FinetuneConfig, StudyConfig, science_hash
from mimkit.errors import UserError
from mimkit.files import write_text

Say = Callable[[str], object]


def study_costs(study: StudyConfig, arms: Mapping[str, Config], *, say: Say) -> Costs:
    """Measured once for a study: with a budget of time, steps and so identities depend on it.

    Arms that come later are timed beside the reference, and their times are scaled as its are.
    """
    file = study_folder(study) / "costs.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    keys = {name: _key(config, length=arms[study.reference]) for name, config in arms.items()}
    broken: dict[str, Exception] = {}
    if missing := {name for name, key in keys.items() if key not in known}:
        found = arm_costs({name: config for name, config in arms.items()
                           if name in missing | {study.reference}}, say=say)  # fmt: skip
        broken = {name: found.broken[name] for name in missing if name in found.broken}
        scale = 1.0
        if study.reference not in missing and study.reference in found.of:
            before = ArmCost(**known[keys[study.reference]])
            scale = before.ms_train / found.of[study.reference].ms_train
        for name in missing - broken.keys():
            known[keys[name]] = _scaled(found.of[name], scale).record()
        if missing - broken.keys():
            write_text(file, json.dumps(known, indent=1))
    return Costs({name: ArmCost(**known[key]) for name, key in keys.items() if key in known},
                 broken)  # fmt: skip


def _key(config: Config, *, length: Config) -> str:
    """How long it trains changes no cost of a step; a user's own code may."""
    digests = "".join(f" {digest}" for digest in build.code_digests(config).values())
    return science_hash(config.model_copy(update={"train": length.train})) + digests


def _scaled(cost: ArmCost, scale: float) -> ArmCost:
    return replace(cost, ms_forward=scale * cost.ms_forward, ms_train=scale * cost.ms_train)


def budget_steps(plan: Plan, costs: Mapping[str, ArmCost], *, say: Say) -> Steps | None:
    """Steps of every arm in every regime; the reference keeps its own. None where steps are equal.

    Args:
        plan: with the steps that settings give.
        costs: of the pretraining's images.

    Raises:
        UserError: a regime's cost of a step cannot be told from that of its forward pass.
    """
    study = plan.study
    if study.budget == "steps":
        return None
    reference = plan.arms[study.reference]
    length = build.build_data(reference.data)[0].epoch_length
    prices = {name: config.train.batch_size * _price(study, costs[name])
              for name, config in plan.arms.items()}  # fmt: skip
    own = build.num_steps(reference.train, length)
    steps = {"pretraining": equal_steps(prices, reference=study.reference, steps=own)}
    for regime in CLASSIFIERS:
        if regime in study.regimes:
            steps[regime] = _of_classifiers(plan, regime, say=say)
    return steps


def _price(study: StudyConfig, cost: ArmCost) -> float:
    return cost.gflops if study.budget == "flops" else cost.ms_train


def _of_classifiers(plan: Plan, regime: ClassifierRegime, *, say: Say) -> dict[str, int]:
    study = plan.study
    configs = {run.arm: classifier_config(study, run, regime) for run in plan.runs
               if run.seed == study.seeds[0]}  # fmt: skip
    sizes = {arm: _side(study, regime, config) for arm, config in configs.items()}
    prices = dict[str, float]()
    for side in dict.fromkeys(sizes.values()):
        there = {arm: _at_side(config, side) for arm, config in plan.arms.items()
                 if sizes[arm] == side or arm == study.reference}  # fmt: skip
        found = study_costs(study, there, say=say)
        for arm, error in found.broken.items():
            raise UserError(f"arm '{arm}': its cost on the {side}-pixel images of {regime} cannot "
                            f"be measured: {type(error).__name__}: {error}") from error  # fmt: skip
        prices |= {arm: configs[arm].train.batch_size * _price(study, found.of[arm])
                   for arm in there if sizes[arm] == side}  # fmt: skip
    reference = configs[study.reference]
    length = build.build_data(reference.data)[0].epoch_length
    steps = build.num_steps(reference.train, length)
    return equal_steps({arm: prices[arm] for arm in configs}, reference=study.reference,
                       steps=steps)  # fmt: skip


def _at_side(config: Config, side: int) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"image_size": side})})


def _side(study: StudyConfig, regime: str, config: FinetuneConfig) -> int:
    """Of the images; refuses what a step's cost does not follow from."""
    other = f"; set it so in {regime}.settings, or budget=steps"
    if config.train.roles != ["all"]:
        raise UserError(
            f"budget={study.budget} takes a step as forward and backward of all weights, but "
            f"{regime} has train.roles={config.train.roles}, whose backward pass costs less; "
            f"expected [all]{other}"
        )
    if not isinstance(config.data.image_size, int):
        raise UserError(f"budget={study.budget} is measured on square images, but {regime} has "
                        f"data.image_size={config.data.image_size}; expected one number"
                        f"{other}")  # fmt: skip
    return config.data.image_size
