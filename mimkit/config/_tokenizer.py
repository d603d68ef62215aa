"""A tokenizer's training: a dVAE or a VQ-KD."""

from pydantic import Field, model_validator

from mimkit.config._data import DataConfig
from mimkit.config._encoder import SizeName
from mimkit.config._section import PartConfig, RunName, Section, Seed
from mimkit.config._training import EngineConfig, OutputConfig, TrainConfig


class TokenizerConfig(Section):
    """What `tools/train_tokenizer.py` reads, whichever tokenizer it trains."""

    name: RunName = "tokenizer"
    seed: Seed = 0
    data: DataConfig = DataConfig()
    train: TrainConfig
    engine: EngineConfig = EngineConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _one_view(self) -> "TokenizerConfig":
        """What concerns the encoder's view would be without effect."""
        for name in ("image_size", "image_interpolation", "mean", "std"):
            if getattr(self.data, name) != DataConfig.model_fields[name].default:
                raise ValueError(f"data.{name} does nothing here: a tokenizer sees token views "
                                 "only; leave it out, and set data.token_size")  # fmt: skip
        return self


class DvaeModelConfig(Section):
    """The DALL-E dVAE's architecture at another size (its own: width 256, 2 blocks, 8192 words)."""

    width: int = Field(256, ge=4, multiple_of=4)
    blocks: int = Field(2, ge=1)
    vocabulary: int = Field(8192, ge=2)


class DvaeObjectiveConfig(Section):
    """Schedules are cosines over a share of the run (DALL-E A.2: tau 5 %, KL 0.17 % of it).

    `balance`, `spread` and `revive` are ours: a small dVAE in a short run collapses to a few words
    without them. Balance [0, 0], spread null and revive 0 are the paper's objective.
    """

    temperature: tuple[float, float] = (1.0, 1 / 16)
    temperature_share: float = Field(0.75, gt=0, le=1)
    kl_weight: float = Field(6.6, ge=0)
    kl_share: float = Field(0.1, gt=0, le=1)
    balance: tuple[float, float] = (0.0, 0.0)  # weight on uneven use of words, first and last
    balance_share: float = Field(0.5, gt=0, le=1)
    spread: float | None = Field(None, gt=0)  # deviation of each word's first logits
    revive: float = Field(0.0, ge=0, lt=1)  # of an equal share of the tokens; a word below is dead
    ema: float = Field(0.999, ge=0, lt=1)


class DvaeConfig(TokenizerConfig):
    model: DvaeModelConfig = DvaeModelConfig()
    objective: DvaeObjectiveConfig = DvaeObjectiveConfig()


class VqkdModelConfig(Section):
    """BEiT v2's is of size B, with 3 (or 1) blocks in the decoder."""

    size: SizeName = "B"
    depth: int | None = Field(None, ge=1)  # None: the size's own
    decoder_depth: int = Field(3, ge=1)
    patch_size: int = Field(16, ge=1)
    vocabulary: int = Field(8192, ge=2)
    code_dim: int = Field(32, ge=1)


class VqkdObjectiveConfig(Section):
    """`revive` is ours: BEiT v2 leaves dead codes dead, which is 0."""

    commitment: float = Field(1.0, ge=0)  # weight of the tokens' distance from their codes
    decay: float = Field(0.99, ge=0, lt=1)  # of the codebook's running average
    revive: float = Field(0.1, ge=0, lt=1)  # of an equal share of the tokens; a code below is dead


class VqkdConfig(TokenizerConfig):
    """Chosen by its section `teacher`: a tokenizer whose targets are numbers, BEiT v2's VQ-KD."""

    teacher: PartConfig
    model: VqkdModelConfig = VqkdModelConfig()
    objective: VqkdObjectiveConfig = VqkdObjectiveConfig()
