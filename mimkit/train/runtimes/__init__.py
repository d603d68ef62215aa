"""A runtime turns gradients into updates, in one process or many. Contract, and the registry."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mimkit.registry import Registry

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state of one parameter


@dataclass(frozen=True)
class UpdateRule:
    """What a runtime must know to update: the same at every stage and world size."""

    micro_batch: int  # samples a rank in one forward
    accumulation: int  # forwards in one update
    clip_grad: float  # 0: off
    bf16: bool
    zero_stage: int
    deepspeed_config: Path | None


class Runtime(ABC):
    """`prepare` once, then `accumulation` times `forward` and `backward`, which updates by itself.

    Weights are restored by loading them into the model before `prepare`, the optimizer's state by
    `restore` after it; `weights` and `moments` gather both, so that one checkpoint serves every
    stage and world size.
    """

    rank: int
    local_rank: int
    world: int
    local_world: int  # ranks on this machine
    device: torch.device
    model: nn.Module  # after `prepare`: call it to go forward, on every rank alike
    grad_norm: Tensor | None = None  # of the last update, before clipping

    def check(self, rule: UpdateRule) -> None:
        """UserError where the engine's own settings contradict the rule; takes no time."""
        return None

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: torch.optim.AdamW, rule: UpdateRule) -> None: ...

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulates gradients; every `accumulation`-th call clips, updates and clears them."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Every parameter (fp32) and buffer, whole, on the CPU. All ranks must call it."""

    @abstractmethod
    def moments(self) -> dict[str, Tensor]:
        """`NAME/exp_avg`, `NAME/exp_avg_sq` of every trained parameter. All ranks must call it."""

    @abstractmethod
    def restore(self, moments: Mapping[str, Tensor], *, updates: int) -> None:
        """Sets the optimizer's state to `moments` after `updates` updates."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, on every rank."""

    @abstractmethod
    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's value on every rank (small Python objects)."""

    @abstractmethod
    def effective_settings(self) -> dict[str, Any]:
        """What the engine runs with, for the run folder."""

    @abstractmethod
    def close(self) -> None: ...


RUNTIMES: Registry[Callable[..., Runtime]] = Registry("runtime", __name__)


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a whole model as fp32 (or integer) copies on the CPU."""
    return {
        name: (value.detach().float() if value.is_floating_point() else value).cpu().clone()
        for name, value in model.state_dict().items()
    }


def start_adamw(optimizer: torch.optim.AdamW, parameters: list[Tensor], *, updates: int) -> None:
    """Gives AdamW its state now, where torch would make it in the first step."""
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.tensor(float(updates), device=parameter.device),
            **{key: torch.zeros_like(parameter) for key in MOMENTS},
        }
