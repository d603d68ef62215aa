"""How a run trains, on what, and what it writes: the sections that every training has."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from mimkit.config._section import Section, Share


class TrainConfig(Section):
    """The optimisation; defaults are BEiT's at a global batch of 2048."""

    steps: int | None = Field(None, ge=1)
    epochs: float | None = Field(None, gt=0)
    batch_size: int = Field(2048, ge=1)  # global: over all ranks and accumulated micro-batches
    lr: float = Field(1.5e-3, gt=0)
    min_lr: float = Field(1e-5, ge=0)
    warmup: float = Field(0.0125, ge=0, lt=1)  # share of the run; BEiT: 10 of 800 epochs
    weight_decay: float = Field(0.05, ge=0)
    weight_decay_end: float | None = Field(None, ge=0)  # by half a cosine; None: constant
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(3.0, ge=0)  # 0: off
    ema: float | None = Field(None, gt=0, lt=1)  # decay of an average of the weights; None: none
    # an update whose gradient is not finite is never made; then: stop, go on with the next batch,
    # or go back to the last checkpoint and on with the next batch
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    max_nonfinite: int = Field(10, ge=0)  # more of them stop the run

    @field_validator("clip_grad", mode="before")
    @classmethod
    def _zero_is_off(cls, value: object) -> object:
        if value is None:
            raise ValueError("0 turns clipping off")
        return value

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.steps and train.epochs, null for the other")
        return self


class EngineConfig(Section):
    runtime: Literal["deepspeed", "local"] = "deepspeed"
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 where the hardware has it
    zero_stage: int = Field(1, ge=0, le=3)
    deepspeed_config: str | None = None  # your own JSON; a contradiction stops the run
    accumulation: int = Field(1, ge=1)  # micro-batches per optimizer step
    workers: int | None = Field(None, ge=0)  # loader processes a rank; None: chosen from the cores
    threads: int | None = Field(None, ge=1)  # torch threads a rank; None: cores / local ranks
    activation_checkpointing: bool = False
    matmul: Literal["auto", "torch"] = "auto"  # fp32 on a CPU: oneDNN where a probe finds it faster
    compile: Literal[False, "block"] = False  # needs a compiler, and a minute at the start
    token_bank: str | None = None  # folder that tools/make_tokens.py filled; changes no loss
    timeout: float = Field(30, gt=0)  # minutes that ranks wait for one that does not answer

    @model_validator(mode="after")
    def _compiled_blocks_are_whole(self) -> "EngineConfig":
        if self.compile == "block" and self.zero_stage == 3:
            raise ValueError(
                "engine.compile=block needs whole weights, which engine.zero_stage=3 gathers layer "
                "by layer; set engine.zero_stage to 0, 1 or 2, or engine.compile=false"
            )
        return self


class RunOutputConfig(Section):
    """What every training writes."""

    runs_dir: str = "runs"
    dir: str | None = None  # None: runs_dir/NAME-NNN, or the unfinished run of this configuration
    log_every: int = Field(10, ge=1)
    checkpoint_every: int = Field(1000, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    keep_every: int | None = Field(None, ge=1)  # and for good those of every so many updates
    evaluate_every: int = Field(1000, ge=1)
    tensorboard: bool = True


class OutputConfig(RunOutputConfig):
    picture_every: int = Field(1000, ge=1)
