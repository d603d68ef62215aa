"""What every section of a configuration is: typed, complete, and not to be changed."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Settings = dict[str, Any]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
RunName = Annotated[str, Field(pattern=r"^[\w.-]+$")]  # a part of the run folder's name


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PartConfig(Section):
    """Which part, by its file's name; the other keys are that part's own arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def settings(self) -> Settings:
        return dict(self.model_extra or {})
