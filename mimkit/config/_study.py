"""A study: arms, seeds, regimes, and what all of its runs have in common."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from mimkit.config._section import RunName, Section, Seed, Settings

Regime = Literal["probes", "finetuning", "supervised"]
ProbeName = Literal["knn", "linear", "attentive"]
Budget = Literal["steps", "flops", "time"]
Count = Annotated[int, Field(ge=1)]


# What a study decides for each of its runs: setting -> where it is said instead.
_SET_BY_STUDY = {
    "name": "the arm's name and seed are in its folder's",
    "seed": "seeds of the study say it",
    "output.dir": "folder of the study says where",
    "output.runs_dir": "folder of the study says where",
    "engine.token_bank": "it fills banks of its own, in its folder",
}
_SET_FOR_CLASSIFIERS = _SET_BY_STUDY | {
    "init": "it is the arm's pretraining, or nothing",
    "stem": "it is the arm's: arms.ARM.settings.stem",
    "encoder": "it is the arm's: arms.ARM.settings.encoder",
}
_LENGTH = ("train.steps", "train.epochs")


def _gives(settings: Settings, key: str) -> bool:
    first, _, rest = key.partition(".")
    inner = settings.get(first)
    return first in settings and (not rest or (isinstance(inner, dict) and _gives(inner, rest)))


def _refuse(settings: Settings, reserved: dict[str, str]) -> Settings:
    """`settings`; ValueError where they give what would be overwritten without a word."""
    if found := [f"{key} ({why})" for key, why in reserved.items() if _gives(settings, key)]:
        raise ValueError(f"a study sets {', '.join(found)} in each of its runs; leave it out here")
    return settings


class ArmConfig(Section):
    """One row of the table: what it changes of the settings that all runs have."""

    settings: Settings = Field({})
    classifier: Settings = Field({})  # over those of finetuning and supervised: train.roles
    declares: list[str] = Field([])  # settings besides the study's `varies` that differ on purpose
    paper: str | None = None  # its row in the paper's Table 7

    @field_validator("settings")
    @classmethod
    def _left_to_the_arm(cls, settings: Settings) -> Settings:
        return _refuse(settings, _SET_BY_STUDY)

    @field_validator("classifier")
    @classmethod
    def _left_to_the_classifier(cls, settings: Settings) -> Settings:
        return _refuse(settings, _SET_FOR_CLASSIFIERS)


class RegimeConfig(Section):
    """A finetuning or a supervised training: a shipped configuration, and changes to it."""

    base: str
    settings: Settings = Field({})

    @field_validator("settings")
    @classmethod
    def _left_to_the_regime(cls, settings: Settings) -> Settings:
        return _refuse(settings, _SET_FOR_CLASSIFIERS)


class StudyConfig(Section):
    """`settings` are of pretraining, and those of each arm come over them."""

    name: RunName = "study"
    title: str = "Which patch stem is better, and by how much?"
    pretraining: str = "default"  # a configuration: a shipped one, or a file
    settings: Settings = Field({})
    varies: list[str] = Field(["stem"])  # what arms may differ in; anything else is declared
    arms: dict[RunName, ArmConfig | None]  # null takes one away that a base has
    reference: str  # the arm that others are compared with
    control: str | None = None  # and the arm of equal or more FLOPs
    seeds: list[Seed] = Field([0, 1, 2])
    regimes: list[Regime] = Field(["probes"])
    probes: dict[ProbeName, Settings] = Field({"knn": {}, "linear": {}})  # and their settings; null
    #                                                             takes one away that a base has
    probe_images: tuple[Count, Count] = (5000, 5000)  # at most, of each split
    budget: Budget = "steps"  # what is equal in all arms and each regime; the reference's
    finetuning: RegimeConfig | None = None
    supervised: RegimeConfig | None = None
    primary: Literal["knn", "linear", "attentive", "finetuning", "supervised"] = "linear"
    confidence: float = Field(0.95, gt=0.5, lt=1)
    folder: str | None = None  # null: runs/NAME

    @field_validator("seeds", "regimes", "varies")
    @classmethod
    def _each_once(cls, values: list[str]) -> list[str]:
        if not values or len(set(values)) < len(values):
            raise ValueError("expected a list with at least one entry, each once")
        return values

    @field_validator("settings")
    @classmethod
    def _left_to_all_runs(cls, settings: Settings) -> Settings:
        return _refuse(settings, _SET_BY_STUDY)

    @field_validator("probes", mode="before")
    @classmethod
    def _without_those_taken_away(cls, probes: object) -> object:
        if not isinstance(probes, dict):
            return probes
        return {name: settings for name, settings in probes.items() if settings is not None}

    @field_validator("probes")
    @classmethod
    def _named_by_their_keys(cls, probes: dict[ProbeName, Settings]) -> dict[ProbeName, Settings]:
        return {name: _refuse(settings, {"name": f"it is {name}"})
                for name, settings in probes.items()}  # fmt: skip

    @model_validator(mode="after")
    def _a_section_for_each_regime(self) -> Self:
        for regime in ("finetuning", "supervised"):
            named, given = regime in self.regimes, getattr(self, regime) is not None
            if named and not given:
                raise ValueError(f"regimes names {regime}, but the section {regime} is missing; "
                                 f"give it a base, {regime}={{base: finetune_small}}, or leave it "
                                 "out of regimes")  # fmt: skip
            if given and not named:
                raise ValueError(f"regimes has no {regime}, but the section {regime} is given; set "
                                 f"{regime}=null, or name it in regimes")  # fmt: skip
        if "probes" in self.regimes and not self.probes:
            raise ValueError("regimes names probes, but there are none; give one, as in "
                             "probes.knn={}, or leave it out of regimes")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = list(self.present_arms)
        for role, arm in (("reference", self.reference), ("control", self.control)):
            if arm is not None and arm not in names:
                raise ValueError(f"{role} is '{arm}', which is no arm; arms: {', '.join(names)}")
        if self.control == self.reference:
            raise ValueError(f"control and reference are both '{self.control}'; set control=null")
        if self.primary not in self.measures:
            raise ValueError(f"primary is {self.primary}, which this study does not measure; it "
                             f"measures {', '.join(self.measures)}")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _one_says_how_long(self) -> Self:
        for name, arm in self.present_arms.items():
            own = [
                f"{section} gives {key}"
                for key in _LENGTH
                for section, given in (("settings", arm.settings), ("classifier", arm.classifier))
                if _gives(given, key)
            ]
            if own and self.budget != "steps" and name != self.reference:
                raise ValueError(f"arms.{name}.{own[0]}, but budget={self.budget} "
                                 "makes an arm as long as the reference's cost allows; leave it "
                                 "out, or set budget=steps")  # fmt: skip
        return self

    @property
    def present_arms(self) -> dict[str, ArmConfig]:
        return {name: arm for name, arm in self.arms.items() if arm is not None}

    @property
    def measures(self) -> list[str]:
        """Accuracies of each run, by name."""
        probes = list(self.probes) if "probes" in self.regimes else []
        return probes + [regime for regime in self.regimes if regime != "probes"]
