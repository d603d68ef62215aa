"""A study's configuration -> its runs, each with an identity: a hash of everything that matters."""

import hashlib
import json
import traceback
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mimkit import build
from mimkit.ablation.confounds import check_confounds
from mimkit.ablation.published import published
from mimkit.config import (
    Config,
    PartConfig,
    Settings,
    StudyConfig,
    load_config,
    science_of,
)
from mimkit.errors import UserError
from mimkit.resources import shipped_config

Steps = dict[str, dict[str, int]]  # of each arm, by regime: pretraining, finetuning, supervised


@dataclass(frozen=True)
class Run:
    """One pretraining of the study."""

    arm: str
    seed: int
    config: Config
    identity: str  # what its folder's name ends in
    home: Path  # the folder of all runs
    first: str  # of the arms that share it, differing in their classifiers only
    code: dict[str, str]  # digests of the parts that are a user's own
    opened: "Opened"
    steps: dict[str, int]  # by regime, where a budget gives them

    @cached_property
    def folder(self) -> Path:
        """A run of this identity that is there, whatever its arm was called; or a new one."""
        found = sorted(self.home.glob(f"*-{self.identity}"))
        return found[0] if found else self.home / f"{self.first}-seed{self.seed}-{self.identity}"

    @property
    def finished(self) -> bool:
        return (self.folder / "summary.json").exists()


@dataclass(frozen=True)
class Plan:
    """All runs of a study, seed by seed, so that one that is stopped early has whole pairs.

    Attributes:
        arms: the configuration of each, with the first seed.
        facts: digests of data and tokenizer, which all runs share.
        confounds: of each arm, what it declares that differs besides what the study varies.
    """

    study: StudyConfig
    folder: Path
    arms: dict[str, Config]
    runs: list[Run]
    facts: dict[str, str | None]
    confounds: dict[str, list[str]]

    @property
    def steps(self) -> Steps:
        """Those that a budget of FLOPs or time gave; empty where steps are equal."""
        found: Steps = {}
        for run in self.runs:
            for regime, steps in run.steps.items():
                found.setdefault(regime, {})[run.arm] = steps
        return found

    def of(self, arm: str) -> list[Run]:
        return [run for run in self.runs if run.arm == arm]


def arm_configs(study: StudyConfig, *, seed: int) -> dict[str, Config]:
    """Each arm's pretraining with this seed, as it is before the budget.

    Raises:
        UserError: a setting does not exist, names the arm.
    """
    path = configuration_file(study.pretraining, key="pretraining")
    configs = {}
    for name, arm in study.present_arms.items():
        common: Settings = {"name": "pretrain", "seed": seed}
        try:
            configs[name] = load_config(path, layers=[study.settings, arm.settings, common])
        except UserError as error:
            raise UserError(f"arm '{name}': {error}") from error
    return configs


def configuration_file(name: str, *, key: str) -> Path:
    """A file, or a shipped configuration by its name."""
    path = Path(name) if Path(name).is_file() else shipped_config(name)
    if path is None:
        raise UserError(f"{key} is '{name}', which is neither a file nor the name of a shipped "
                        "configuration")  # fmt: skip
    return path


def study_folder(study: StudyConfig) -> Path:
    return Path(study.folder or f"runs/{study.name}")


def make_plan(study: StudyConfig, *, steps: Steps | None = None) -> Plan:
    """
    Args:
        steps: where the budget is not equal steps.

    Raises:
        UserError: arms differ in more than they say, two are the same, a part does not exist, data
            or tokenizer cannot be read.
    """
    folder = study_folder(study)
    _check_rows(study)
    steps = steps or {}
    by_seed = {seed: _with_steps(arm_configs(study, seed=seed), steps.get("pretraining"))
               for seed in study.seeds}  # fmt: skip
    arms = by_seed[study.seeds[0]]
    for name, config in arms.items():
        _check_parts(name, config)
    for probe, settings in study.probes.items():
        build.check_probe(PartConfig(name=probe, **settings))
    confounds = check_confounds(study, arms)
    opened = {name: _open(config) for name, config in arms.items()}
    code = {name: build.code_digests(config) for name, config in arms.items()}
    runs, first = list[Run](), dict[str, str]()
    for seed in study.seeds:
        for name in arms:
            config = by_seed[seed][name]
            identity = _identity(config, opened[name].facts, code[name])
            shared = first.setdefault(identity, name)
            own = {regime: by_arm[name] for regime, by_arm in steps.items()}
            runs.append(Run(name, seed, config, identity, folder / "runs", shared, code[name],
                            opened[name], own))  # fmt: skip
    return Plan(study, folder, arms, runs, opened[study.reference].facts, confounds)


def _check_rows(study: StudyConfig) -> None:
    """UserError where an arm names a row of the paper's table that there is not."""
    for name, arm in study.present_arms.items():
        if arm.paper is None:
            continue
        try:
            published(arm.paper)
        except UserError as error:
            raise UserError(f"arms.{name}.paper: {error}") from error


def _check_parts(arm: str, config: Config) -> None:
    try:
        build.check_parts(config)
    except UserError as error:
        raise UserError(f"arm '{arm}': {error}") from error
    except Exception as error:
        if not build.code_digests(config):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]  # of the user's own code
        raise UserError(f"arm '{arm}': a part cannot be built: {type(error).__name__}: {error} "
                        f"({last.filename}, line {last.lineno})") from error  # fmt: skip


def _with_steps(configs: dict[str, Config], steps: dict[str, int] | None) -> dict[str, Config]:
    if steps is None:
        return configs
    return {
        name: config.model_copy(
            update={"train": config.train.model_copy(update={"steps": steps[name], "epochs": None})}
        )
        for name, config in configs.items()
    }


@dataclass(frozen=True)
class Opened:
    """Data and tokenizer of an arm.

    Attributes:
        facts: their digests.
        words: whether targets are tokens, that a bank can hold.
    """

    facts: dict[str, str | None]
    words: bool


_OPENED: dict[str, Opened] = {}


def _open(config: Config) -> Opened:
    """Arms share them, so that they are opened once."""
    key = json.dumps([config.data.model_dump(mode="json"), config.tokenizer.model_dump()])
    if key not in _OPENED:
        train, heldout = build.build_data(config.data)
        tokenizer = build.build_tokenizer(config)
        facts = {
            "train_digest": train.digest,
            "heldout_digest": heldout.digest if heldout else None,
            "tokenizer": build.tokenizer_fingerprint(config, tokenizer),
        }
        _OPENED[key] = Opened(facts, words=tokenizer.vocabulary is not None)
    return _OPENED[key]


def _identity(config: Config, facts: dict[str, str | None], code: dict[str, str]) -> str:
    """Equal for runs that would give equal numbers, whatever their arms are called.

    Args:
        code: digests of what is a user's own.
    """
    text = json.dumps([science_of(config), facts, *([code] if code else [])], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
