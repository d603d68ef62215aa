"""A pretraining."""

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from mimkit.config._data import DataConfig
from mimkit.config._encoder import EncoderConfig
from mimkit.config._section import PartConfig, RunName, Section, Seed
from mimkit.config._training import EngineConfig, OutputConfig, TrainConfig


class ProbeConfig(Section):
    """kNN on frozen features at the end of a run, and on the way where `every` is set."""

    neighbours: int = Field(20, ge=1)
    pooling: Literal["mean", "cls"] = "mean"
    depth: float = Field(1.0, gt=0, le=1)  # share of the blocks to go through; 1: and the last norm
    train_limit: int = Field(5000, ge=1)
    heldout_limit: int = Field(5000, ge=1)
    every: int | None = Field(None, ge=1)  # updates; null: at the end only
    every_limit: int = Field(1000, ge=1)  # images of each split, on the way

    @model_validator(mode="after")
    def _limit_of_something(self) -> Self:
        if self.every is None and self.every_limit != 1000:
            raise ValueError(f"probe.every_limit={self.every_limit} does nothing without "
                             "probe.every; set that to a number of updates")  # fmt: skip
        return self


class Config(Section):
    name: RunName = "pretrain"
    seed: Seed = 0
    data: DataConfig = DataConfig()
    mask: PartConfig = PartConfig(name="blockwise")
    stem: PartConfig = PartConfig(name="hmlp")
    mask_at: PartConfig = PartConfig(name="after_stem")  # or before_stem, dilated
    encoder: EncoderConfig = EncoderConfig()
    tokenizer: PartConfig = PartConfig(name="dvae")
    train: TrainConfig
    probe: ProbeConfig = ProbeConfig()
    engine: EngineConfig = EngineConfig()
    output: OutputConfig = OutputConfig()
