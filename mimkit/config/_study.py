"""A study: arms, seeds, regimes, and what all of its runs have in common."""

from typing import Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from mimkit.config._section import RunName, Section, Seed, Settings

Regime = Literal["probes", "finetuning", "supervised"]
ProbeName = Literal["knn", "linear", "attentive"]
Budget = Literal["steps", "flops", "time"]


class ArmConfig(Section):
    """One row of the table: what it changes of the settings that all runs have."""

    settings: Settings = Field({})
    classifier: Settings = Field({})  # over those of finetuning and supervised: train.roles
    declares: list[str] = Field([])  # settings besides the study's `varies` that differ on purpose
    paper: str | None = None  # its row in the paper's Table 7


class RegimeConfig(Section):
    """A finetuning or a supervised training: a shipped configuration, and changes to it."""

    base: str
    settings: Settings = Field({})


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
    probes: dict[ProbeName, Settings] = Field({"knn": {}, "linear": {}})  # and their settings
    probe_images: tuple[int, int] = (5000, 5000)  # at most, of each split
    budget: Budget = "steps"  # what is equal in all arms; flops and time are the reference's
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = list(self.present_arms)
        for role, arm in (("reference", self.reference), ("control", self.control)):
            if arm is not None and arm not in names:
                raise ValueError(f"{role} is '{arm}', which is no arm; arms: {', '.join(names)}")
        if self.control == self.reference:
            raise ValueError(f"control and reference are both '{self.control}'; set control=null")
        for regime in ("finetuning", "supervised"):
            if (regime in self.regimes) != (getattr(self, regime) is not None):
                raise ValueError(f"regimes {'names' if regime in self.regimes else 'has no'} "
                                 f"{regime}, but the section {regime} is "
                                 f"{'missing' if regime in self.regimes else 'given'}")  # fmt: skip
        if self.primary not in self.measures:
            raise ValueError(f"primary is {self.primary}, which this study does not measure; it "
                             f"measures {', '.join(self.measures)}")  # fmt: skip
        return self

    @property
    def present_arms(self) -> dict[str, ArmConfig]:
        return {name: arm for name, arm in self.arms.items() if arm is not None}

    @property
    def measures(self) -> list[str]:
        """Accuracies of each run, by name."""
        probes = list(self.probes) if "probes" in self.regimes else []
        return probes + [regime for regime in self.regimes if regime != "probes"]
