"""Does the engine change the result? A few updates by plain PyTorch, and the same by DeepSpeed.

Both are whole pretrainings in folders of their own: the one in one process, the other as it is
configured (ZeRO stage, ranks, accumulation, activation checkpointing, DeepSpeed JSON). Losses are
compared update by update, weights element by element at the end.

Weights are measured in steps: AdamW moves an element by about the learning rate in an update, in
the direction that its gradient had, however small that was. Where the gradient is rounding noise
(biases in front of a batch norm, what is masked away), so is the direction; such elements are told
by their second moment, counted, and not compared.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimkit.errors import UserError
from mimkit.train import checkpoint

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
# Share of the longest way that AdamW can go. In fp32 1e-5 to 1e-4 are usual (docs/engine.md); in
# bf16 the sign of a small gradient is rounding, and two weights can go opposite ways
WEIGHT_TOLERANCE = {"fp32": 0.01, "bf16": 0.5}
# Gradients below this share of the root mean square of all are noise. Rounding is 6e-8 of the terms
# of a sum in fp32 and 4e-3 in bf16, and the terms can be many times the sum
_NOISE = {"fp32": 1e-3, "bf16": 0.05}


@dataclass(frozen=True)
class Trace:
    """What one training did, update by update, and where it ended."""

    losses: list[float]
    norms: list[float | None]  # of the gradient before clipping
    rates: list[float]  # learning rates
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


@dataclass(frozen=True)
class TensorDifference:
    """One parameter or buffer at the end.

    `steps` is the largest difference in units of the sum of the learning rates, over elements whose
    gradient is more than noise; a buffer has none and is compared relative to its size.
    """

    name: str
    largest: float
    steps: float
    noise: int  # elements not compared


@dataclass(frozen=True)
class Parity:
    """Differences between two trainings, with the tolerances they are held to."""

    precision: str
    plain_losses: list[float]
    losses: list[float]
    norm_difference: float | None  # relative, the largest over updates
    tensors: list[TensorDifference]  # the worst first

    @property
    def loss_difference(self) -> float:
        """Largest of all updates; NaN where one of the two was not finite."""
        gaps = [abs(a - b) for a, b in zip(self.plain_losses, self.losses, strict=True)]
        return math.nan if any(map(math.isnan, gaps)) else max(gaps)

    @property
    def worst(self) -> TensorDifference:
        return self.tensors[0]

    @property
    def losses_agree(self) -> bool:
        return self.loss_difference <= LOSS_TOLERANCE[self.precision]

    @property
    def weights_agree(self) -> bool:
        return self.worst.steps <= WEIGHT_TOLERANCE[self.precision]

    @property
    def equal(self) -> bool:
        return self.losses_agree and self.weights_agree


def read_trace(run: Path) -> Trace:
    """Out of a run folder with a line for every update and a checkpoint of the last one."""
    path = checkpoint.latest(run / "checkpoints")
    if path is None:
        raise UserError(f"{run} has no checkpoint: the training did not reach its end")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    last = checkpoint.load(path)
    return Trace(
        losses=[line["loss"] for line in train],
        norms=[line.get("grad_norm") for line in train],
        rates=[line["lr"] for line in train],
        weights=last.weights,
        moments=last.moments,
    )


def compare(plain: Trace, other: Trace, *, precision: str, beta2: float) -> Parity:
    """How far `other` is from `plain`, which says which gradients are noise.

    Raises:
        UserError: the two have different updates or tensors, so they were no trainings of one kind.
    """
    if len(plain.losses) != len(other.losses) or plain.weights.keys() != other.weights.keys():
        raise UserError(
            f"the two trainings do not fit: {len(plain.losses)} and {len(other.losses)} updates, "
            f"{len(plain.weights)} and {len(other.weights)} tensors"
        )
    tensors = _tensor_differences(plain, other, beta2=beta2, floor=_NOISE[precision])
    tensors.sort(key=lambda one: -one.steps if one.steps == one.steps else -math.inf)
    return Parity(
        precision, plain.losses, other.losses, _norm_difference(plain.norms, other.norms), tensors
    )


def _norm_difference(plain: list[float | None], other: list[float | None]) -> float | None:
    pairs = [(a, b) for a, b in zip(plain, other, strict=True) if a is not None and b is not None]
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=None)


def _tensor_differences(
    plain: Trace, other: Trace, *, beta2: float, floor: float
) -> list[TensorDifference]:
    correction = 1 - beta2 ** len(plain.losses)
    gradients = {
        name.removesuffix("/exp_avg_sq"): (value / correction).sqrt()
        for name, value in plain.moments.items()
        if name.endswith("/exp_avg_sq")
    }
    everything = sum(float(g.double().square().sum()) for g in gradients.values())
    typical = math.sqrt(everything / max(sum(g.numel() for g in gradients.values()), 1))
    way = sum(plain.rates)
    found = []
    for name, value in plain.weights.items():
        gap = (value.double() - other.weights[name].double()).abs()
        noise = torch.zeros_like(gap, dtype=torch.bool)
        unit = torch.as_tensor(max(float(value.double().abs().max()), 1e-12))
        if name in gradients:
            noise, unit = gradients[name] < floor * typical, torch.as_tensor(way)
        elif (bias := _bias_in_front(name, list(plain.weights))) in gradients:
            noise = gradients[bias] < floor * typical
        steps = torch.where(noise, 0.0, gap / unit)
        found.append(TensorDifference(name, _most(gap), _most(steps), int(noise.sum())))
    return found


def _bias_in_front(name: str, names: list[str]) -> str | None:
    """The bias that a running mean takes up: where one wanders, so does the other."""
    module, _, leaf = name.rpartition(".")
    before = names[: names.index(name)]
    others = [other for other in before if not other.startswith(f"{module}.")]
    mine = leaf == "running_mean" and others and others[-1].endswith(".bias")
    return others[-1] if mine else None


def _most(values: Tensor) -> float:
    """The largest; NaN where there is one."""
    return float(values.max()) if values.numel() else 0.0


def numbers(parity: Parity) -> dict[str, Any]:
    """For a JSON file."""
    return {
        "equal": parity.equal,
        "precision": parity.precision,
        "loss_tolerance": LOSS_TOLERANCE[parity.precision],
        "weight_tolerance": WEIGHT_TOLERANCE[parity.precision],
        "loss_difference": parity.loss_difference,
        "norm_difference": parity.norm_difference,
        "plain_losses": parity.plain_losses,
        "losses": parity.losses,
        "tensors": [vars(tensor) for tensor in parity.tensors],
    }
