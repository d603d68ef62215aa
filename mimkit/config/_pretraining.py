"""A pretraining."""

from typing import Literal

from pydantic import Field

from mimkit.config._data import DataConfig
from mimkit.config._encoder import EncoderConfig
from mimkit.config._section import PartConfig, RunName, Section, Seed
from mimkit.config._training import EngineConfig, OutputConfig, TrainConfig


class ProbeConfig(Section):
    """kNN on frozen features at the end of a run."""

    neighbours: int = Field(20, ge=1)
    pooling: Literal["mean", "cls"] = "mean"
    depth: float = Field(1.0, gt=0, le=1)  # share of the blocks to go through; 1: and the last norm
    train_limit: int = Field(5000, ge=1)
    heldout_limit: int = Field(5000, ge=1)


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
