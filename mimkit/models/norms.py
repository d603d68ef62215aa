"""Normalisation for stems, on feature maps BCHW: over the batch, or over channels at each place."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class BatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation whose statistics are over all ranks, on any backend, always in float32.

    In one process it is nn.BatchNorm2d. torch's SyncBatchNorm refuses the CPU, and inside bf16 the
    published hMLP's statistics would be bf16; running statistics here stay float32 whatever the
    module is cast to, and are equal on every rank after every step.
    """

    momentum: float

    def __init__(self, channels: int) -> None:
        super().__init__(channels)

    def forward(self, input: Tensor) -> Tensor:
        features_BCHW = input.float()
        weight_C, bias_C = self.weight.float(), self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            if self.training and _world_size() > 1:
                normed_BCHW = self._synchronised(features_BCHW, weight_C, bias_C)
            else:
                normed_BCHW = self._local(features_BCHW, weight_C, bias_C)
        return normed_BCHW.to(input.dtype)

    def _local(self, features_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor) -> Tensor:
        """torch's own, with plain layouts for a batch of one image.

        There torch 2.14 on a CPU silently computes wrong gradients when the gradient that comes in
        lies channels last under an odd batch stride, as that of `flatten(2).transpose(1, 2)` does.
        """
        if self.training:
            self._counter.add_(1)
        single = len(features_BCHW) == 1
        normed_BCHW = functional.batch_norm(
            features_BCHW.contiguous() if single else features_BCHW,
            self.running_mean,
            self.running_var,
            weight_C,
            bias_C,
            self.training,
            self.momentum,
            self.eps,
        )
        if single and normed_BCHW.requires_grad:
            normed_BCHW.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        return normed_BCHW

    def _synchronised(self, features_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor) -> Tensor:
        """Two passes, mean then centred squares: one pass of sums of squares cancels digits."""
        count = features_BCHW.new_tensor([features_BCHW.numel() / self.num_features])
        sums = sum_over_ranks(torch.cat([features_BCHW.sum((0, 2, 3)), count]))
        total = sums[-1].detach()
        mean_C = sums[:-1] / total
        centred_BCHW = features_BCHW - mean_C[:, None, None]
        variance_C = sum_over_ranks(centred_BCHW.square().sum((0, 2, 3))) / total
        self._remember(mean_C.detach(), variance_C.detach() * total / (total - 1))
        scale_C = weight_C * torch.rsqrt(variance_C + self.eps)
        return centred_BCHW * scale_C[:, None, None] + bias_C[:, None, None]

    @torch.no_grad()
    def _remember(self, mean_C: Tensor, variance_C: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        self._counter.add_(1)
        self.running_mean.lerp_(mean_C, self.momentum)
        self.running_var.lerp_(variance_C, self.momentum)

    @property
    def _counter(self) -> Tensor:
        assert self.num_batches_tracked is not None
        return self.num_batches_tracked

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BatchNorm2d":
        """`.to`, `.bfloat16()` and the like: the running statistics move but stay float32."""
        kept = {"running_mean": self.running_mean, "running_var": self.running_var}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old_C in kept.items():
            new_C = cast(Tensor, getattr(self, name))
            if old_C is not None and new_C.dtype != torch.float32:
                setattr(self, name, old_C.to(new_C.device, torch.float32))
        return self


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels at each position of a BCHW map; positions never meet.

    GroupNorm(1, C) also normalises over space and so leaks masked pixels. Epsilon 1e-6 as in the
    encoder; the paper's LayerNorm stem was not published.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _SumOverRanks(torch.autograd.Function):
    """all_reduce with a gradient: what each rank's loss feels of the sum goes back to all ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _reduced(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _reduced(gradients[0])


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of `value` over all ranks, differentiable; every rank must call it in the same order.

    torch.distributed.nn.functional.all_reduce does the same and warns that it is deprecated.
    """
    return cast(Tensor, _SumOverRanks.apply(value))  # type: ignore[no-untyped-call]


def _reduced(value: Tensor) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
