"""What the machine itself reaches: the best rate of matrix products, by precision and library."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mimkit.bench.timing import clock_of
from mimkit.models.matmul import has_onednn, onednn_linear

_ROWS, _ROUNDS = 1576, 3  # the tokens of 8 images of 14 x 14 patches


def matmul_ceilings(
    width: int, *, device: torch.device, bf16: bool, done: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """GFLOP/s by "fp32 torch", "fp32 onednn" (on a CPU) and "bf16": the best of some shapes.

    The shapes are the two wide products of a block of this width, and a large square one.
    """
    rows = _ROWS if device.type == "cpu" else 32 * _ROWS
    side = 1024 if device.type == "cpu" else 8192
    shapes = [(rows, width, 4 * width), (rows, 4 * width, width), (side, side, side)]
    kinds: dict[str, tuple[torch.dtype, Callable[[Tensor, Tensor], Tensor]]] = {
        "fp32 torch": (torch.float32, functional.linear)
    }
    if device.type == "cpu" and has_onednn():
        kinds["fp32 onednn"] = (torch.float32, onednn_linear)
    if bf16:
        kinds["bf16"] = (torch.bfloat16, functional.linear)
    found = dict.fromkeys(kinds, 0.0)
    for shape in shapes:
        for name, (dtype, product) in kinds.items():
            found[name] = max(found[name], _rate(shape, dtype, product, device))
            done()
    return found


def best(ceilings: dict[str, float], *, bf16: bool) -> float:
    """The rate that a step of this precision is measured against."""
    return max(rate for name, rate in ceilings.items() if name.startswith("bf16") == bf16)


@torch.no_grad()
def _rate(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    product: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
) -> float:
    rows, inner, columns = shape
    left = torch.rand(rows, inner, device=device).to(dtype)
    right = torch.rand(columns, inner, device=device).to(dtype)
    clock = clock_of(device)
    product(left, right)
    least = min(clock(lambda: product(left, right)) for _ in range(_ROUNDS))
    return 2e-9 * rows * inner * columns / least
