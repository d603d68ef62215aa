"""Multi-head self-attention as in BEiT: no bias for keys, an optional bias on the scores."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

QkvBias = Literal["qv", "qkv"]


class Attention(nn.Module):
    """tokens_BND -> tokens_BND.

    timm's Attention has one bias for queries, keys and values; BEiT learns `q_bias` and `v_bias`
    only. timm's BEiT attention has those, but always runs torch's fused attention, which is the
    slower way on a CPU (see `attend`).

    Args:
        width: D, a multiple of `heads`.
        heads: K.
        qkv_bias: "qv" for BEiT's two biases, "qkv" for ViT's full one.
    """

    def __init__(self, width: int, *, heads: int, qkv_bias: QkvBias) -> None:
        super().__init__()
        self.heads = heads
        self.linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = functional.linear
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias == "qkv")
        separate = qkv_bias == "qv"
        self.q_bias = nn.Parameter(torch.zeros(width)) if separate else None
        self.v_bias = nn.Parameter(torch.zeros(width)) if separate else None
        self.proj = nn.Linear(width, width)

    def forward(self, tokens_BND: Tensor, *, bias_KNN: Tensor | None = None) -> Tensor:
        qkv_BNE = self.linear(tokens_BND, self.qkv.weight, self.qkv_bias())
        head = self.proj.in_features // self.heads
        qkv_BN3Kd = qkv_BNE.reshape(*qkv_BNE.shape[:2], 3, self.heads, head)
        q_BKNd, k_BKNd, v_BKNd = qkv_BN3Kd.permute(2, 0, 3, 1, 4)
        mixed_BKNd = attend(q_BKNd, k_BKNd, v_BKNd, bias_KNN=bias_KNN)
        mixed_BND: Tensor = self.proj(mixed_BKNd.transpose(1, 2).flatten(2))
        return mixed_BND

    def qkv_bias(self) -> Tensor | None:
        """The bias of queries, keys and values together, (3 D,); None where there is none."""
        if self.q_bias is None or self.v_bias is None:
            return self.qkv.bias
        return torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])


def attend(q_BKNd: Tensor, k_BKNd: Tensor, v_BKNd: Tensor, *, bias_KNN: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v, fused on CUDA and as the plain formula elsewhere.

    Forward and backward in bf16 on a CPU: the formula takes 0.5 of the fused kernel's time at 14x14
    patches and 0.16 at 6x6; in float32 1.08 and 0.88. With a learned bias the fused one is slower.
    """
    if q_BKNd.is_cuda:
        return attend_fused(q_BKNd, k_BKNd, v_BKNd, bias_KNN=bias_KNN)
    mixed_BKNd: Tensor = _Formula.apply(q_BKNd, k_BKNd, v_BKNd, bias_KNN)  # type: ignore[no-untyped-call]
    return mixed_BKNd


def attend_fused(
    q_BKNd: Tensor, k_BKNd: Tensor, v_BKNd: Tensor, *, bias_KNN: Tensor | None
) -> Tensor:
    """The same by torch's fused attention, which keeps no probabilities."""
    mask_1KNN = None if bias_KNN is None else bias_KNN.to(q_BKNd.dtype)[None]
    return functional.scaled_dot_product_attention(q_BKNd, k_BKNd, v_BKNd, attn_mask=mask_1KNN)


def aligned(bias_KNN: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The bias as CUDA's fused kernels read it, or torch copies it in every block: in the dtype of
    the queries, and rows that start at multiples of 8 numbers (there are 197 at 14x14 patches)."""
    columns = bias_KNN.shape[-1]
    return functional.pad(bias_KNN.to(dtype), (0, -columns % 8))[..., :columns]


class _Formula(torch.autograd.Function):
    """The formula, keeping one tensor of probabilities for backward, in the dtype of the values.

    Written out, autograd keeps the scores, probabilities in float32 and again in bf16. Measured
    against that: 1.1 to 1.3 x the speed in bf16, 1.0 to 1.1 x in float32, and a fifth less memory
    for a whole ViT. Softmax is in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BKNd: Tensor, k_BKNd: Tensor, v_BKNd: Tensor, bias_KNN: Tensor | None
    ) -> Tensor:
        ctx.scale, ctx.biased = q_BKNd.shape[-1] ** -0.5, bias_KNN is not None
        scores_BKNN = (q_BKNd * ctx.scale) @ k_BKNd.transpose(-2, -1)
        if bias_KNN is not None:
            scores_BKNN = scores_BKNN + bias_KNN
        share_BKNN = scores_BKNN.float().softmax(-1).to(v_BKNd.dtype)
        ctx.save_for_backward(q_BKNd, k_BKNd, v_BKNd, share_BKNN)
        mixed_BKNd: Tensor = share_BKNN @ v_BKNd
        return mixed_BKNd

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q_BKNd, k_BKNd, v_BKNd, share_BKNN = ctx.saved_tensors
        (of_mixed_BKNd,) = gradients
        of_share_BKNN = of_mixed_BKNd @ v_BKNd.transpose(-2, -1)
        of_scores_BKNN = torch.ops.aten._softmax_backward_data(
            of_share_BKNN, share_BKNN, -1, share_BKNN.dtype
        )
        return (
            (of_scores_BKNN @ k_BKNd) * ctx.scale,
            of_scores_BKNN.transpose(-2, -1) @ (q_BKNd * ctx.scale),
            share_BKNN.transpose(-2, -1) @ of_mixed_BKNd,
            of_scores_BKNN.float().sum(0) if ctx.biased else None,
        )
