"""Typed configuration: YAML files with a base, overrides `key=value`, and no key that goes unread.

Sections are promises. `output` and `engine` never change what is computed, save `engine.precision`
(and the float rounding that comes with another number of ranks); everything else is the science of
the run, and a run folder is only continued when the science is the same.
"""

from mimkit.config._data import DataConfig, ShardSet, SourceConfig
from mimkit.config._encoder import ArchitectureConfig, EncoderConfig, SizeName
from mimkit.config._finetuning import FinetuneConfig, LabelledDataConfig
from mimkit.config._load import (
    load_config,
    load_finetune_config,
    load_study_config,
    load_tokenizer_config,
    recipe,
)
from mimkit.config._pretraining import Config, ProbeConfig
from mimkit.config._science import differences, science_hash, science_of, to_yaml
from mimkit.config._section import PartConfig, Section, Seed, Settings
from mimkit.config._study import ArmConfig, Budget, RegimeConfig, StudyConfig
from mimkit.config._tokenizer import DvaeConfig, TokenizerConfig, VqkdConfig
from mimkit.config._training import EngineConfig, OutputConfig, TrainConfig

__all__ = [
    "ArchitectureConfig", "ArmConfig", "Budget", "Config", "DataConfig", "DvaeConfig",
    "EncoderConfig", "EngineConfig", "FinetuneConfig", "LabelledDataConfig", "OutputConfig",
    "PartConfig", "ProbeConfig", "RegimeConfig", "Section", "Seed", "Settings", "ShardSet",
    "SizeName", "SourceConfig", "StudyConfig", "TokenizerConfig", "TrainConfig", "VqkdConfig",
    "differences", "load_config", "load_finetune_config", "load_study_config",
    "load_tokenizer_config", "recipe", "science_hash", "science_of", "to_yaml",
]  # fmt: skip
