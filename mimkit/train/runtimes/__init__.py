"""A runtime turns gradients into updates, in one process or many. Contract, and the registry."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mimkit.registry import Registry

MOMENTS = ("exp_avg", "exp_avg_sq")  # the state of one parameter, of AdamW and of Lamb


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
    module: nn.Module  # after `prepare`: the model as it was given
    model: nn.Module  # after `prepare`: call it to go forward, on every rank alike
    grad_norm: Tensor | None = None  # of the last update, before clipping
    applied = True  # whether the last update was made: not where its gradient was not finite

    def check(self, rule: UpdateRule) -> None:
        """UserError where the engine's own settings contradict the rule; takes no time."""
        return None

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: Optimizer, rule: UpdateRule) -> None:
        """Takes both over: torch's AdamW, or at stage 0 timm's Lamb; any groups, any of the
        parameters frozen."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulates gradients; every `accumulation`-th call clips, updates and clears them.

        A gradient that is not finite, on any rank, updates nothing, neither weights nor moments:
        then `applied` is False, on all ranks.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Every parameter (fp32) and buffer, whole, on the CPU. All ranks must call it."""

    @abstractmethod
    def moments(self) -> dict[str, Tensor]:
        """`NAME/exp_avg`, `NAME/exp_avg_sq` of every trained parameter. All ranks must call it."""

    @abstractmethod
    def restore(self, moments: Mapping[str, Tensor], *, updates: int) -> None:
        """Sets the optimizer's state to `moments` after `updates` updates that were applied."""

    @torch.no_grad()
    def go_back(self, weights: Mapping[str, Tensor]) -> None:
        """Sets the trained parameters and the buffers to those of `weights`, as they were once.

        All ranks must call it, between two updates.
        """
        with self.writing_parts():
            for name, part in self.parts().items():
                part.copy_(self.part_of(name, weights[name]))
        self._parts_are_new()
        for name, buffer in self.module.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])

    def _parts_are_new(self) -> None:
        """For engines that keep copies of them."""
        return None

    @abstractmethod
    def parts(self) -> dict[str, Tensor]:
        """Of every trained parameter what this rank holds, itself and no copy: all of it, or at
        ZeRO stage 3 its flat shard, the last one padded."""

    @abstractmethod
    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """A copy of what this rank would hold of a parameter that is `whole`, on its device."""

    @contextlib.contextmanager
    def writing_parts(self) -> Iterator[None]:
        """`parts` may be written to inside, for forward passes only; all ranks must enter it."""
        yield

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, on every rank."""

    @abstractmethod
    def any(self, flag: bool) -> bool:
        """Whether a rank says yes, on every rank. Between CPUs: no device waits for it."""

    @abstractmethod
    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's value on every rank (small Python objects)."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank (small Python objects)."""

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


def start_moments(optimizer: Optimizer, parameters: Sequence[Tensor], *, updates: int) -> None:
    """Gives the optimizer its state now, where it would make it in the first step.

    Args:
        parameters: all that it has, or what the engine put in their place.
    """
    for parameter in parameters:
        optimizer.state[parameter] = {key: torch.zeros_like(parameter) for key in MOMENTS}
        if isinstance(optimizer, torch.optim.AdamW):
            step = torch.tensor(float(updates), device=parameter.device)
            optimizer.state[parameter]["step"] = step
    if not isinstance(optimizer, torch.optim.AdamW):  # timm's Lamb counts once a group, on the CPU
        for group in optimizer.param_groups:
            group["step"] = torch.tensor(float(updates))
