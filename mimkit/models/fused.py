"""Parallel blocks for inference, their branches side by side in wide matrix products."""

import copy
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimkit.errors import UserError
from mimkit.models.attention import attend
from mimkit.models.blocks import EPS, AttentionBranch, Block, MlpBranch
from mimkit.models.encoder import ImageEncoder

Linear = tuple[Tensor, Tensor]  # weight (outputs, inputs) and bias


def fused(model: ImageEncoder) -> ImageEncoder:
    """A copy for inference whose blocks are fused: in eval mode, its parameters frozen.

    It gives the same tokens up to rounding; its state dict is another one. Expect a gain for small
    batches only: on a V100 two branches side by side ran 21-47 % faster up to a batch of 4, and
    slower from 16 on (P, Table 4).
    """
    if any(isinstance(block, FusedBlock) for block in model.encoder.blocks):
        raise UserError("the encoder is fused already")
    fast = copy.deepcopy(model).eval()
    blocks = [FusedBlock(cast(Block, block)) for block in fast.encoder.blocks]
    fast.encoder.blocks = nn.ModuleList(blocks)
    return fast.requires_grad_(False)


class FusedBlock(nn.Module):
    """What `block` computes, in four matrix products whatever its number of branches R.

    Norms of branches differ in scale and shift only, which go into the weights behind them;
    LayerScale goes into the weights before it. So all branches read one normalised input, attention
    has R K heads, and the wide `proj` and `fc2` sum the branches.

    For inference: the folded weights are not the block's parameters any more, training through the
    wide products is slower than branch by branch, and ZeRO-3, which gathers parameters module by
    module, would gather those of all branches at once.
    """

    @torch.no_grad()
    def __init__(self, block: Block) -> None:
        super().__init__()
        assert isinstance(block, Block), "fused already"
        source = copy.deepcopy(block).double()  # folded weights are rounded once, in the last line
        attns = [cast(AttentionBranch, branch) for branch in source.attns]
        ffns = [cast(MlpBranch, branch) for branch in source.ffns]
        self.heads = len(attns) * attns[0].attn.heads
        self.qkv = _wide_qkv(attns)
        self.proj = _WideOut([_scaled(b.ls, b.attn.proj.weight, b.attn.proj.bias) for b in attns])
        self.fc1 = _wide_fc1(ffns)
        self.act = ffns[0].mlp.act
        self.fc2 = _WideOut([_scaled(b.ls, b.mlp.fc2.weight, b.mlp.fc2.bias) for b in ffns])
        self.to(next(block.parameters()).dtype).requires_grad_(False)

    def forward(
        self,
        tokens_BND: Tensor,
        *,
        bias_KNN: Tensor | None = None,
        keep_B2R: Tensor | None = None,
    ) -> Tensor:
        """As `Block.forward`."""
        keep_attn_BR, keep_mlp_BR = (None, None) if keep_B2R is None else keep_B2R.unbind(1)
        mixed_BNE = self._mix(_normalise(tokens_BND), bias_KNN)
        tokens_BND = tokens_BND + self.proj(mixed_BNE, keep_BR=keep_attn_BR)
        hidden_BNE = self.act(self.fc1(_normalise(tokens_BND)))
        out_BND: Tensor = tokens_BND + self.fc2(hidden_BNE, keep_BR=keep_mlp_BR)
        return out_BND

    def _mix(self, normal_BND: Tensor, bias_KNN: Tensor | None) -> Tensor:
        """Attention with the heads of all branches; E is R D, branch by branch."""
        batch, num_tokens, _ = normal_BND.shape
        qkv_BN3Kd = self.qkv(normal_BND).reshape(batch, num_tokens, 3, self.heads, -1)
        q_BKNd, k_BKNd, v_BKNd = qkv_BN3Kd.permute(2, 0, 3, 1, 4)
        if bias_KNN is not None:  # a block has one for all its branches
            bias_KNN = bias_KNN.repeat(self.heads // len(bias_KNN), 1, 1)
        mixed_BKNd = attend(q_BKNd, k_BKNd, v_BKNd, bias_KNN=bias_KNN)
        return mixed_BKNd.transpose(1, 2).flatten(2)


class _WideOut(nn.Module):
    """hidden_BNE of all branches -> the sum of what they add (B, N, D)."""

    bias_RD: Tensor

    def __init__(self, branches: list[Linear]) -> None:
        super().__init__()
        weights, biases = zip(*branches, strict=True)
        self.register_buffer("bias_RD", torch.stack(biases))  # for keep_BR
        self.sum = _linear(torch.cat(weights, 1), self.bias_RD.sum(0))

    def forward(self, hidden_BNE: Tensor, *, keep_BR: Tensor | None) -> Tensor:
        if keep_BR is None:
            sum_BND: Tensor = self.sum(hidden_BNE)
            return sum_BND
        assert keep_BR.shape[1] == len(self.bias_RD), "keep_B2R has one multiplier a branch"
        hidden_BNRe = hidden_BNE.reshape(*hidden_BNE.shape[:2], len(self.bias_RD), -1)
        kept_BNE = (hidden_BNRe * keep_BR[:, None, :, None]).flatten(2).to(hidden_BNE.dtype)
        bias_BD = keep_BR.to(self.bias_RD.dtype) @ self.bias_RD
        return functional.linear(kept_BNE, self.sum.weight) + bias_BD[:, None]


def _normalise(tokens_BND: Tensor) -> Tensor:
    return functional.layer_norm(tokens_BND, tokens_BND.shape[-1:], eps=EPS)


def _wide_qkv(branches: list[AttentionBranch]) -> nn.Linear:
    """D -> 3 R D: the queries of all branches, then keys, then values, as `Attention` has them."""
    width = branches[0].attn.qkv.in_features
    folded = [_unnormed(b.norm, b.attn.qkv.weight, b.attn.qkv_bias()) for b in branches]
    weight_R3DD = torch.stack([weight_ED.reshape(3, width, width) for weight_ED, _ in folded])
    bias_R3D = torch.stack([bias_E.reshape(3, width) for _, bias_E in folded])
    return _linear(weight_R3DD.transpose(0, 1).flatten(0, 2), bias_R3D.transpose(0, 1).flatten())


def _wide_fc1(branches: list[MlpBranch]) -> nn.Linear:
    """D -> 4 R D, branch by branch."""
    folded = [_unnormed(b.norm, b.mlp.fc1.weight, b.mlp.fc1.bias) for b in branches]
    weights, biases = zip(*folded, strict=True)
    return _linear(torch.cat(weights), torch.cat(biases))


def _unnormed(norm: nn.LayerNorm, weight_ED: Tensor, bias_E: Tensor | None) -> Linear:
    """The linear map behind `norm`, as one of tokens normalised without scale and shift."""
    assert bias_E is not None
    return weight_ED * norm.weight, bias_E + weight_ED @ norm.bias


def _scaled(scale: nn.Module, weight_DE: Tensor, bias_D: Tensor | None) -> Linear:
    """The linear map before a LayerScale, with it; without one, as it is."""
    assert bias_D is not None
    gamma_D = scale(torch.ones_like(bias_D))
    return gamma_D[:, None] * weight_DE, gamma_D * bias_D


def _linear(weight_ED: Tensor, bias_E: Tensor) -> nn.Linear:
    linear = nn.Linear(weight_ED.shape[1], weight_ED.shape[0], device="meta")
    linear.weight, linear.bias = nn.Parameter(weight_ED), nn.Parameter(bias_E)
    return linear
