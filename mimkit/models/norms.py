"""Normalisation for stems: over the batch, or over channels at each place.

Both take feature maps (B, C, H, W) and rows (R, C), one row a place of any image.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

Statistics = Literal["all", "visible", "frozen"]


class BatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation whose statistics are over all ranks, on any backend, always in float32.

    In one process it is nn.BatchNorm2d. torch's SyncBatchNorm refuses the CPU, and inside bf16 the
    published hMLP's statistics would be bf16; running statistics here stay float32 whatever the
    module is cast to, and are equal on every rank after every step.

    Args:
        channels: C.
        statistics: what training normalises by. "all": mean and variance of every place of the
            batch (the paper's; masked pixels move every token through them). "visible": of the
            places outside the mask. "frozen": the running statistics, which then never change.
    """

    momentum: float

    def __init__(self, channels: int, *, statistics: Statistics = "all") -> None:
        super().__init__(channels)
        self.statistics = statistics

    @property
    def counts_masked(self) -> bool:
        """Whether, as things are, a masked place has a part in what others are normalised by."""
        return self.training and self.statistics == "all"

    def forward(self, input: Tensor, counted_BHW: Tensor | None = None) -> Tensor:
        """`counted_BHW`: the places of a map that "visible" counts; rows are all counted."""
        features = input.float()
        weight_C, bias_C = self.weight.float(), self.bias.float()
        pooled = self.training and self.statistics != "frozen"
        with _full_precision(input.device.type):
            few = features.numel() <= self.num_features  # one place, which torch refuses
            if pooled and (counted_BHW is not None or _world_size() > 1 or few):
                normed = self._pooled(features, weight_C, bias_C, counted_BHW)
            else:
                normed = self._local(features, weight_C, bias_C, pooled=pooled)
        return normed.to(input.dtype)

    def _local(self, features: Tensor, weight_C: Tensor, bias_C: Tensor, *, pooled: bool) -> Tensor:
        """torch's own, with plain layouts for a batch of one image.

        There torch 2.14 on a CPU silently computes wrong gradients when the gradient that comes in
        lies channels last under an odd batch stride, as that of `flatten(2).transpose(1, 2)` does.
        """
        if pooled:
            self._counter.add_(1)
        single = features.ndim == 4 and len(features) == 1
        normed = functional.batch_norm(
            features.contiguous() if single else features,
            self.running_mean,
            self.running_var,
            weight_C,
            bias_C,
            pooled,
            self.momentum,
            self.eps,
        )
        if single and normed.requires_grad:
            normed.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        return normed

    def _pooled(
        self, features: Tensor, weight_C: Tensor, bias_C: Tensor, counted_BHW: Tensor | None
    ) -> Tensor:
        """Statistics over the counted places of all ranks.

        Two passes, mean then centred squares: one pass of sums of squares cancels digits.
        """
        places = [dim for dim in range(features.ndim) if dim != 1]
        shape = [-1] + [1] * (features.ndim - 2)  # a number a channel, against maps or rows
        weights = None if counted_BHW is None else counted_BHW[:, None].to(features.dtype)
        count = features[:, 0].new_tensor(features.numel() / self.num_features)
        count = count if weights is None else weights.sum()

        def summed(values: Tensor) -> Tensor:
            return (values if weights is None else values * weights).sum(places)

        sums = sum_over_ranks(torch.cat([summed(features), count[None]]))
        total = sums[-1].detach().clamp_min(1)
        mean_C = sums[:-1] / total
        centred = features - mean_C.view(shape)
        variance_C = sum_over_ranks(summed(centred.square())) / total
        unbiased_C = variance_C.detach() * total / (total - 1).clamp_min(1)
        self._remember(mean_C.detach(), unbiased_C)
        scale_C = weight_C * torch.rsqrt(variance_C + self.eps)
        return centred * scale_C.view(shape) + bias_C.view(shape)

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
    """LayerNorm over the channels at each place of a BCHW map or a row; places never meet.

    GroupNorm(1, C) also normalises over space and so leaks masked pixels. Epsilon 1e-6 as in the
    encoder; the paper's LayerNorm stem was not published.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim == 2:
            return super().forward(input)
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
    if _world_size() == 1:
        return value
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    """Without autocast, where the device has it (the meta device, which only counts, has not)."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
