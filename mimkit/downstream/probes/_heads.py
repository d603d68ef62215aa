"""Many small heads trained together on cached features: one pass over the images serves all."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from mimkit.downstream.probes import Progress
from mimkit.random import Purpose, generator

_CHUNK = 1024  # images that are read at once
EPS = 1e-6  # of the standardisation, as in MAE's linear probe


class Plan(NamedTuple):
    """How long heads are trained: `epochs`, but at least `least` updates."""

    epochs: int
    least: int
    batch: int = 256

    def steps(self, images: int) -> int:
        return max(self.least, self.epochs * max(1, images // self.batch))


class Standard(NamedTuple):
    """Every feature minus its mean, over its standard deviation.

    MAE's and AIM's BatchNorm without affine parameters in front of a probe: features that are
    cached do not change, so their statistics are computed once, exactly, over all training images.
    """

    mean: Tensor
    scale: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        return (features.float() - self.mean) * self.scale


def measure(array: NDArray[np.floating], rows: Tensor, *, over: tuple[int, ...]) -> Standard:
    """Of the rows of an array of (B, ...); `over` are the axes that share their statistics."""
    numbers = rows.numpy()
    chunks = [numbers[first : first + _CHUNK] for first in range(0, len(numbers), _CHUNK)]
    weights = [len(chunk) / len(numbers) for chunk in chunks]
    mean = sum(w * _read(array, c).mean(over, keepdims=True)
               for w, c in zip(weights, chunks, strict=True))  # fmt: skip
    variance = sum(w * ((_read(array, c) - mean) ** 2).mean(over, keepdims=True)
                   for w, c in zip(weights, chunks, strict=True))  # fmt: skip
    scale = 1 / np.sqrt(np.asarray(variance) + EPS)
    return Standard(
        torch.from_numpy(np.asarray(mean)[0]).float(), torch.from_numpy(scale[0]).float()
    )


def _read(array: NDArray[np.floating], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    return array[np.sort(rows)].astype(np.float64)


def train_heads(
    heads: Mapping[float, nn.ModuleList],
    optimizer: Callable[[list[dict[str, object]]], torch.optim.Optimizer],
    *,
    features: Callable[[Tensor], Tensor],
    label_B: Tensor,
    rows: Tensor,
    plan: Plan,
    seed: int,
    progress: Progress,
) -> None:
    """Trains all heads on the same batches; rates fall to 0 along a cosine.

    Losses are summed over heads, so no head feels another.

    Args:
        heads: by peak learning rate; each maps features of a batch to logit_LBV, for L heads.
        features: rows -> the batch's features, on the device.
        rows: of the images to train on.
    """
    modules = [module for group in heads.values() for module in group]
    optimiser = optimizer([part for rate, group in heads.items() for part in _groups(rate, group)])
    steps = plan.steps(len(rows))
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for step, batch in enumerate(_batches(rows, steps, plan.batch, seed=seed), start=1):
        x, target_B = features(batch), label_B[batch]
        loss = _loss(torch.cat([module(x) for module in modules]), target_B.to(x.device))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        falling.step()
        progress(step, steps)


def _groups(rate: float, heads: nn.ModuleList) -> Iterator[dict[str, object]]:
    """Biases do not decay."""
    named = [*heads.named_parameters()]
    yield {"params": [p for name, p in named if "bias" not in name], "lr": rate}
    yield {"params": [p for name, p in named if "bias" in name], "lr": rate, "weight_decay": 0.0}


def _loss(logit_LBV: Tensor, target_B: Tensor) -> Tensor:
    """Mean over images, sum over heads."""
    target_LB = target_B.expand(len(logit_LBV), -1)
    total = functional.cross_entropy(logit_LBV.flatten(0, 1), target_LB.flatten(), reduction="sum")
    return total / len(target_B)


def _batches(rows: Tensor, steps: int, batch: int, *, seed: int) -> Iterator[Tensor]:
    """Epochs of full batches in an order of their own; a set smaller than a batch is one."""
    epoch, left = 0, rows[:0]
    for _ in range(steps):
        if len(left) < min(batch, len(rows)):
            rng = generator(Purpose.PROBE, seed=seed, epoch=epoch)
            left, epoch = rows[torch.from_numpy(rng.permutation(len(rows)))], epoch + 1
        yield left[:batch].sort().values  # memory maps like to be read forwards
        left = left[batch:]


@torch.no_grad()
def head_logits(
    heads: nn.ModuleList, features: Callable[[Tensor], Tensor], rows: Tensor
) -> list[Tensor]:
    """logit_LBV on the CPU of each head module, for all rows."""
    found: list[list[Tensor]] = [[] for _ in heads]
    for first in range(0, len(rows), _CHUNK):
        x = features(rows[first : first + _CHUNK])
        for parts, module in zip(found, heads, strict=True):
            parts.append(module(x).cpu())
    return [torch.cat(parts, 1) for parts in found]
