"""Pre-norm transformer blocks with one or more branches side by side, and their drop path."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.models.attention import Attention, QkvBias
from mimkit.random import Purpose, torch_generator

EPS = 1e-6  # of every LayerNorm in BEiT and timm

# timm's blocks draw drop path from the global generator and take no bias on the scores. Its MLP and
# LayerScale are these, but importing them takes as long as importing torch.


class LayerScale(nn.Module):
    """Multiplies each of D channels by a learned number."""

    def __init__(self, width: int, *, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, tokens_BND: Tensor) -> Tensor:
        return tokens_BND * self.gamma


class Mlp(nn.Module):
    """D -> hidden -> D with an exact GELU between."""

    def __init__(self, width: int, *, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        out_BND: Tensor = self.fc2(self.act(self.fc1(tokens_BND)))
        return out_BND


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
        self.mlp = Mlp(width, hidden=4 * width)
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
        keep_B2R: Tensor | None = None,
    ) -> Tensor:
        """All attentions read the same tokens, then all MLPs do.

        Args:
            bias_KNN: added to the scores of every attention.
            keep_B2R: multiplies what attention (0) and MLP (1) of each of the R branches add to a
                sample; None keeps all.
        """
        keep_attn_BR, keep_mlp_BR = (None, None) if keep_B2R is None else keep_B2R.unbind(1)
        attended = [branch(tokens_BND, bias_KNN=bias_KNN) for branch in self.attns]
        tokens_BND = _add(tokens_BND, attended, keep_BR=keep_attn_BR)
        return _add(tokens_BND, [branch(tokens_BND) for branch in self.ffns], keep_BR=keep_mlp_BR)


def drop_path_rates(depth: int, rate: float) -> list[float]:
    """Chance that a block's residual is dropped: 0 for the first block, linear to `rate` (BEiT)."""
    if not 0 <= rate < 1:
        raise UserError(f"encoder.drop_path is {rate}; it must be at least 0 and less than 1")
    return [rate * index / max(1, depth - 1) for index in range(depth)]


def draw_keep(
    rates_L: Sequence[float], *, batch: int, generator: torch.Generator, branches: int = 1
) -> Tensor:
    """Multipliers keep_LB2R for every block, sample, residual (attention, MLP) and branch.

    Each is 0, or 1 / (1 - rate); float32. Every branch drops by itself, as in timm's parallel
    block. Drawn for the global batch from one generator, so that a rank that takes its slice of B
    trains as one big process would.
    """
    keep_L111 = 1 - torch.tensor(rates_L, device=generator.device)[:, None, None, None]
    shape = (len(rates_L), batch, 2, branches)
    draw_LB2R = torch.rand(shape, generator=generator, device=generator.device)
    return (draw_LB2R < keep_L111) / keep_L111


def drop_path_of_update(
    rates_L: Sequence[float],
    *,
    seed: int,
    update: int,
    rows: slice,
    batch: int,
    branches: int,
    device: torch.device,
) -> Tensor | None:
    """`draw_keep` for some rows of an update's global batch: ranks and accumulation do not change
    it. None where nothing is ever dropped."""
    if not any(rates_L):
        return None
    noise = torch_generator(Purpose.DROP_PATH, seed=seed, sample=update)
    keep_LB2R = draw_keep(rates_L, batch=batch, branches=branches, generator=noise)
    return keep_LB2R[:, rows].to(device, non_blocking=True)


def _add(tokens_BND: Tensor, residuals: Sequence[Tensor], *, keep_BR: Tensor | None) -> Tensor:
    if keep_BR is not None:
        # strict, or branches that keep_BR does not know would be left out
        pairs = zip(residuals, keep_BR.unbind(1), strict=True)
        residuals = [
            (r_BND * keep_B[:, None, None]).to(tokens_BND.dtype) for r_BND, keep_B in pairs
        ]
    residual_BND = residuals[0] if len(residuals) == 1 else torch.stack(tuple(residuals)).sum(0)
    return tokens_BND + residual_BND


def _scale(width: int, layer_scale: float | None) -> nn.Module:
    return nn.Identity() if layer_scale is None else LayerScale(width, start=layer_scale)
