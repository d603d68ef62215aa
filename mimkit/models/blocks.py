"""Pre-norm transformer blocks with one or more branches side by side, and their drop path."""

from collections.abc import Sequence

import torch

# timm's MLP (exact GELU) and LayerScale are BEiT's; its blocks draw drop path from the global
# generator and take no bias on the scores, so the block itself is ours.
from timm.layers.layer_scale import LayerScale
from timm.layers.mlp import Mlp
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.models.attention import Attention, QkvBias

EPS = 1e-6  # of every LayerNorm in BEiT and timm


class AttentionBranch(nn.Module):
    """LayerScale(attention(LayerNorm(tokens)))."""

    def __init__(
        self, width: int, *, heads: int, qkv_bias: QkvBias, layer_scale: float | None
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.attn = Attention(width, heads=heads, qkv_bias=qkv_bias)
        self.ls = _scale(width, layer_scale)

    def forward(self, tokens_BND: Tensor, *, bias_KNN: Tensor | None) -> Tensor:
        residual_BND: Tensor = self.ls(self.attn(self.norm(tokens_BND), bias_KNN=bias_KNN))
        return residual_BND


class MlpBranch(nn.Module):
    """LayerScale(MLP(LayerNorm(tokens))), hidden width 4 D."""

    def __init__(self, width: int, *, layer_scale: float | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.mlp = Mlp(width, hidden_features=4 * width)
        self.ls = _scale(width, layer_scale)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        residual_BND: Tensor = self.ls(self.mlp(self.norm(tokens_BND)))
        return residual_BND


class Block(nn.Module):
    """x' = x + sum of attention branches of x; out = x' + sum of MLP branches of x' (P, section 3).

    One branch is the plain pre-norm block. Every branch has its own norm and LayerScale; names of
    parameters are those of timm's ParallelThingsBlock.

    Args:
        layer_scale: where LayerScale starts; None is without it.
        branches: how many attentions, and how many MLPs, stand side by side.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        qkv_bias: QkvBias = "qv",
        layer_scale: float | None = None,
        branches: int = 1,
    ) -> None:
        super().__init__()
        self.attns = nn.ModuleList(
            AttentionBranch(width, heads=heads, qkv_bias=qkv_bias, layer_scale=layer_scale)
            for _ in range(branches)
        )
        self.ffns = nn.ModuleList(
            MlpBranch(width, layer_scale=layer_scale) for _ in range(branches)
        )

    def forward(
        self,
        tokens_BND: Tensor,
        *,
        bias_KNN: Tensor | None = None,
        keep_B2: Tensor | None = None,
    ) -> Tensor:
        """`keep_B2` multiplies what attention (0) and MLP (1) add to a sample; None keeps all."""
        keep_attn_B, keep_mlp_B = (None, None) if keep_B2 is None else keep_B2.unbind(1)
        attended = [branch(tokens_BND, bias_KNN=bias_KNN) for branch in self.attns]
        tokens_BND = _add(tokens_BND, attended, keep_B=keep_attn_B)
        return _add(tokens_BND, [branch(tokens_BND) for branch in self.ffns], keep_B=keep_mlp_B)


def drop_path_rates(depth: int, rate: float) -> list[float]:
    """Chance that a block's residual is dropped: 0 for the first block, linear to `rate` (BEiT)."""
    if not 0 <= rate < 1:
        raise UserError(f"encoder.drop_path is {rate}; it must be at least 0 and less than 1")
    return [rate * index / max(1, depth - 1) for index in range(depth)]


def draw_keep(rates_L: Sequence[float], *, batch: int, generator: torch.Generator) -> Tensor:
    """Multipliers keep_LB2 for every block, sample and residual: 0, or 1 / (1 - rate); float32.

    Drawn for the global batch from one generator, so that a rank that takes its slice of B trains
    as one big process would.
    """
    keep_L11 = 1 - torch.tensor(rates_L, device=generator.device)[:, None, None]
    shape = (len(rates_L), batch, 2)
    draw_LB2 = torch.rand(shape, generator=generator, device=generator.device)
    return (draw_LB2 < keep_L11) / keep_L11


def _add(tokens_BND: Tensor, residuals: Sequence[Tensor], *, keep_B: Tensor | None) -> Tensor:
    residual_BND = residuals[0] if len(residuals) == 1 else torch.stack(tuple(residuals)).sum(0)
    if keep_B is not None:
        residual_BND = (residual_BND * keep_B[:, None, None]).to(tokens_BND.dtype)
    return tokens_BND + residual_BND


def _scale(width: int, layer_scale: float | None) -> nn.Module:
    return nn.Identity() if layer_scale is None else LayerScale(width, init_values=layer_scale)
