"""Plain PyTorch in one process: what the DeepSpeed runtime is compared with."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mimkit.errors import UserError
from mimkit.train.runtimes import (
    MOMENTS,
    RUNTIMES,
    Runtime,
    UpdateRule,
    plain_weights,
    start_moments,
)


class _Autocast(nn.Module):
    """The model under bf16 autocast, as DeepSpeed's engine wraps it."""

    def __init__(self, model: nn.Module, device: torch.device, *, bf16: bool) -> None:
        super().__init__()
        self.module = model
        self.device_type, self.bf16 = device.type, bf16

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.bf16):
            return self.module(*inputs, **named)


@RUNTIMES.register
class LocalRuntime(Runtime):
    """One process, one device; there is nobody to wait for."""

    def __init__(self, *, timeout: float = 30) -> None:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            raise UserError(
                f"engine.runtime=local trains in one process, but {world} were launched; "
                "set engine.runtime=deepspeed or start it without a launcher"
            )
        self.rank = self.local_rank = 0
        self.world = self.local_world = 1
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def prepare(self, model: nn.Module, optimizer: Optimizer, rule: UpdateRule) -> None:
        self.module = model.to(self.device)
        self.model = _Autocast(self.module, self.device, bf16=rule.bf16)
        self._optimizer, self._rule, self._calls = optimizer, rule, 0
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        start_moments(optimizer, list(self._trained.values()), updates=0)

    def backward(self, loss: Tensor) -> None:
        (loss / self._rule.accumulation).backward()  # type: ignore[no-untyped-call]
        self._calls += 1
        if self._calls % self._rule.accumulation:
            return
        limit = self._rule.clip_grad or float("inf")
        self.grad_norm = nn.utils.clip_grad_norm_(self._trained.values(), limit)
        self.applied = math.isfinite(self.grad_norm)
        if self.applied:
            self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return plain_weights(self.module)

    def moments(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": self._optimizer.state[parameter][key].cpu().clone()
            for name, parameter in self._trained.items()
            for key in MOMENTS
        }

    def restore(self, moments: Mapping[str, Tensor], *, updates: int) -> None:
        start_moments(self._optimizer, list(self._trained.values()), updates=updates)
        for name, parameter in self._trained.items():
            for key in MOMENTS:
                self._optimizer.state[parameter][key].copy_(moments[f"{name}/{key}"])

    def parts(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self._trained.items()}

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        return whole.to(self._trained[name], copy=True)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def any(self, flag: bool) -> bool:
        return flag

    def from_rank_0(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def effective_settings(self) -> dict[str, Any]:
        return {"runtime": "local", "bf16": self._rule.bf16, "clip_grad": self._rule.clip_grad}

    def close(self) -> None:
        pass
