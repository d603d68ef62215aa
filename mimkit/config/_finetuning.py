"""A finetuning, or a supervised training from scratch."""

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from mimkit.config._data import CroppedConfig
from mimkit.config._encoder import ArchitectureConfig
from mimkit.config._section import PartConfig, Positive, RunName, Section, Seed
from mimkit.config._training import EngineConfig, RunOutputConfig, TrainConfig

Side = Annotated[int, Field(ge=8)]
RoleName = Literal[
    "all", "attention", "ffn", "norm", "bias", "scale", "stem", "position", "token", "head"
]


class LabelledDataConfig(CroppedConfig):
    """Images with labels, and how views to train on and to judge by are cut."""

    test: str | list[str] | None = None  # looked at once, by the best weights
    heldout_limit: int | None = Field(None, ge=1)  # held-out images, by hash of key; null: all
    image_size: Side | tuple[Side, Side] = 224  # pixels; height and width where it is no square
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    test_crop: float = Field(0.875, gt=0, le=1)  # of the short side; the centre is judged
    augment: str | None = "rand-m9-mstd0.5-inc1"  # a policy in timm's words, null for none
    erasing: float = Field(0.25, ge=0, le=1)  # share of the views that lose a rectangle to noise
    repeats: int = Field(1, ge=1)  # views of an image side by side in the order (DeiT: 3)
    mean: tuple[float, float, float] | None = None  # null: what the encoder was trained with
    std: tuple[Positive, Positive, Positive] | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError("data.mean and data.std belong together; give both or neither")
        return self


class ClassifierConfig(Section):
    """What stands on the encoder, and how the encoder is taken over."""

    classes: int | None = Field(None, ge=2)  # null: as many as the data have
    pooling: Literal["mean", "cls"] = "mean"  # mean: of the patches, with a fresh norm (BEiT)
    drop_path: float = Field(0.1, ge=0, lt=1)
    head_scale: float = Field(0.001, ge=0)  # of a fresh head's first weights (BEiT's init_scale)
    fresh_head: bool = False  # true: a finetuned model's own head is not taken over
    per_block_bias: bool = True  # a shared relative bias becomes one a block (BEiT's finetuning)
    resize: Literal["bicubic", "geometric"] = "bicubic"  # of a relative bias, to another grid


class FinetuneTrainConfig(TrainConfig):
    """Defaults are BEiT-B's for ImageNet-1k (paper, Table 13)."""

    batch_size: int = Field(1024, ge=1)  # global, as in pretraining
    lr: float = Field(4e-3, gt=0)
    min_lr: float = Field(1e-6, ge=0)
    warmup: float = Field(0.2, ge=0, lt=1)  # share of the run; BEiT: 20 of 100 epochs
    clip_grad: float = Field(0.0, ge=0)  # 0: off
    optimizer: Literal["adamw", "lamb"] = "adamw"
    layer_decay: float = Field(0.65, gt=0, le=1)  # of the learning rate, from each block to the one
    #                                               below it; 1: the same rate everywhere
    roles: list[RoleName] = Field(["all"])  # what trains besides the head
    freeze_head: bool = False
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    bce_threshold: float | None = Field(None, ge=0, lt=1)  # a class whose share is above it counts
    smoothing: float = Field(0.1, ge=0, lt=1)
    mixup: float = Field(0.8, ge=0)  # alpha; 0: off
    cutmix: float = Field(1.0, ge=0)  # alpha; 0: off
    mix_group: int = Field(16, ge=2, multiple_of=2)  # rows that are mixed with each other

    @field_validator("roles", mode="before")
    @classmethod
    def _one_or_several(cls, roles: object) -> object:
        return [roles] if isinstance(roles, str) else roles

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.roles:
            raise ValueError("train.roles is empty; to train the head alone, set it to head")
        if "all" in self.roles and len(self.roles) > 1:
            raise ValueError(f"train.roles is {self.roles}: all is every role already; leave the "
                             "others out")  # fmt: skip
        if self.bce_threshold is not None and self.loss != "bce":
            raise ValueError("train.bce_threshold does nothing for train.loss=cross_entropy; set "
                             "train.loss=bce or leave it out")  # fmt: skip
        if self.freeze_head and "head" in self.roles:
            raise ValueError("train.roles names head, which train.freeze_head=true freezes; "
                             "choose one")  # fmt: skip
        if self.freeze_head and self.roles == ["all"]:
            others = ", ".join(get_args(RoleName)[1:])
            raise ValueError("train.roles=all has the head in it, which train.freeze_head=true "
                             f"freezes; name roles of {others}")  # fmt: skip
        return self


class FinetuneOutputConfig(RunOutputConfig):
    delta: bool = False  # keep of the best weights only what differs from `init`'s


class FinetuneConfig(Section):
    """`init` brings an encoder with its stem; without it `stem` and `encoder` say what is made."""

    name: RunName = "finetune"
    seed: Seed = 0
    init: str | None = None  # a run folder, an exported encoder, or a published checkpoint
    stem: PartConfig | None = None
    encoder: ArchitectureConfig | None = None
    model: ClassifierConfig = ClassifierConfig()
    data: LabelledDataConfig = LabelledDataConfig()
    train: FinetuneTrainConfig
    engine: EngineConfig = EngineConfig()
    output: FinetuneOutputConfig = FinetuneOutputConfig()

    @model_validator(mode="after")
    def _one_beginning(self) -> Self:
        given = [n for n, part in (("stem", self.stem), ("encoder", self.encoder)) if part]
        if self.init is not None and given:
            raise ValueError(f"init={self.init} brings its own stem and encoder, so the section "
                             f"{' and '.join(given)} would be without effect; set {given[0]}=null, "
                             "or init=null to train from scratch")  # fmt: skip
        if self.init is None and len(given) < 2:
            raise ValueError("give init=RUN, a pretrained encoder: a run folder, an exported file "
                             "or a published checkpoint; or, to train from scratch, both stem and "
                             "encoder, for example stem=linear encoder.size=S")  # fmt: skip
        if self.engine.token_bank is not None:
            raise ValueError("engine.token_bank does nothing here; set it to null")
        if self.output.delta and self.init is None:
            raise ValueError("output.delta=true keeps what differs from init, but init is null; "
                             "set it to false")  # fmt: skip
        return self
