"""What multiplies matrices: bf16 or not, and on a CPU in float32 torch's own choice or oneDNN.

torch calls MKL, which takes a slow path on AMD CPUs with AVX-512: oneDNN was twice as fast there
(the whole step 1.8 x), and no faster on AMD with AVX2 or on Intel. So it is measured.
"""

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimkit.models.attention import Attention

Matmul = Literal["torch", "onednn"]
# oneDNN is chosen from this speed on. Ratios seen are near 1 or near 2, so that noise does not
# decide: two runs of one configuration on one kind of machine must take the same.
_WORTH = 1.4
_SIDE, _ROUNDS = 512, 5  # of the probe: 0.3 GFLOP, some hundredths of a second in all


def probe_matmul() -> tuple[Matmul, float]:
    """The backend to use on this CPU, and oneDNN's speed over torch's."""
    if not has_onednn():
        return "torch", 0.0
    left, right = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
    ours: Callable[[], Tensor] = lambda: _product(left, right, None)  # noqa: E731
    theirs: Callable[[], Tensor] = lambda: functional.linear(left, right)  # noqa: E731
    seconds = [(_cpu_seconds(theirs), _cpu_seconds(ours)) for _ in range(_ROUNDS + 1)][1:]
    speed = min(pair[0] for pair in seconds) / min(pair[1] for pair in seconds)
    return "onednn" if speed >= _WORTH else "torch", speed


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware does so itself: Ampere and newer; AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported())


def has_onednn() -> bool:
    """Whether this torch was built with oneDNN and it is switched on."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and bool(torch.backends.mkldnn.enabled)


def use_onednn(model: nn.Module) -> None:
    """Every linear layer of `model` multiplies by oneDNN from now on.

    Names and parameters stay; what is exported is built anew, and multiplies as torch does. Equal
    to torch's within rounding (1e-6 relative). Under autocast the layers are torch's.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear
        elif isinstance(module, Attention):
            module.linear = onednn_linear


class OneDnnLinear(nn.Linear):
    """nn.Linear by `onednn_linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return onednn_linear(input, self.weight, self.bias)


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`, forward and backward by oneDNN where it is float32 on a CPU."""
    elsewhere = input.dtype != torch.float32 or input.device.type != "cpu"
    if elsewhere or torch.is_autocast_enabled("cpu"):
        return functional.linear(input, weight, bias)
    output: Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    """Opaque to autograd: it never sees the operator, which has no derivative of its own."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight_OI)
        ctx.biased = bias_O is not None
        return _product(input, weight_OI, bias_O)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight_OI = ctx.saved_tensors
        (of_output,) = gradients
        needs_input, needs_weight, _ = ctx.needs_input_grad
        of_RO, input_RI = of_output.flatten(0, -2), input.flatten(0, -2)
        return (
            _product(of_output, weight_OI.t().contiguous(), None) if needs_input else None,
            _product(of_RO.t().contiguous(), input_RI.t().contiguous(), None)
            if needs_weight
            else None,
            of_RO.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None,
        )


def _product(input: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(
        input.contiguous(), weight_OI, bias_O, "none", [], ""
    )
    return output


def _cpu_seconds(work: Callable[[], Tensor]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
