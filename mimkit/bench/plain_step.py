"""BEiT's step, written plainly: what ours is timed beside and proven equal to.

After microsoft/unilm, beit/modeling_pretrain.py and engine_for_pretraining.py: a convolution as
stem, attention written out, a boolean mask before the head, AdamW as a loop, the gradient's norm
as a loop, and numbers fetched in every step.
"""

import copy
import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimkit.bench.workload import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Workload
from mimkit.models.blocks import AttentionBranch, Block, MlpBranch
from mimkit.models.mim import MaskedImageModel
from mimkit.models.roles import decays
from mimkit.models.stems.linear import Linear


class PlainModel(nn.Module):
    """(image_BCHW, mask_BN) -> predicted_MV with a copy of the weights of `model`.

    Args:
        model: of a linear stem, one branch a block and a shared relative bias.
        drop_path: chance of the last block; linear from 0.
    """

    def __init__(self, model: MaskedImageModel, *, drop_path: float) -> None:
        super().__init__()
        self.parts = copy.deepcopy(model)
        self.drop_path = drop_path

    def forward(self, image_BCHW: Tensor, mask_BN: Tensor) -> Tensor:
        parts, encoder = self.parts, self.parts.encoder
        stem = cast(Linear, parts.stem).sequence[0]
        assert isinstance(stem, nn.Conv2d)
        map_BDrc = functional.conv2d(image_BCHW, stem.weight, stem.bias, stem.stride)
        tokens_BND = map_BDrc.flatten(2).transpose(1, 2)
        masked_BN1 = mask_BN[..., None].type_as(parts.mask_token)
        tokens_BND = tokens_BND * (1 - masked_BN1) + parts.mask_token * masked_BN1
        cls_B1D = encoder.cls_token.expand(len(tokens_BND), -1, -1)
        tokens_BND = torch.cat([cls_B1D, tokens_BND], 1)
        bias_KNN = encoder.relative[0]()
        for index, block in enumerate(encoder.blocks):
            rate = self.drop_path * index / max(1, encoder.depth - 1)
            tokens_BND = self._block(cast(Block, block), tokens_BND, bias_KNN, rate)
        predicted_MV: Tensor = parts.head(encoder.norm(tokens_BND)[:, 1:][mask_BN])
        return predicted_MV

    def _block(self, block: Block, tokens_BND: Tensor, bias_KNN: Tensor, rate: float) -> Tensor:
        attention, mlp = cast(AttentionBranch, block.attns[0]), cast(MlpBranch, block.ffns[0])
        added_BND = attention.ls(_attention(attention, tokens_BND, bias_KNN))
        tokens_BND = tokens_BND + self._dropped(added_BND, rate)
        hidden_BNE = functional.gelu(mlp.mlp.fc1(mlp.norm(tokens_BND)))
        return tokens_BND + self._dropped(mlp.ls(mlp.mlp.fc2(hidden_BNE)), rate)

    def _dropped(self, added_BND: Tensor, rate: float) -> Tensor:
        if not rate or not self.training:
            return added_BND
        draw_B11 = torch.rand(len(added_BND), 1, 1, dtype=added_BND.dtype, device=added_BND.device)
        return added_BND / (1 - rate) * (draw_B11 + 1 - rate).floor_()


def _attention(branch: AttentionBranch, tokens_BND: Tensor, bias_KNN: Tensor) -> Tensor:
    attention = branch.attn
    batch, num_tokens, width = tokens_BND.shape
    qkv_BNE = functional.linear(branch.norm(tokens_BND), attention.qkv.weight, attention.qkv_bias())
    qkv_BN3Kd = qkv_BNE.reshape(batch, num_tokens, 3, attention.heads, -1)
    q_BKNd, k_BKNd, v_BKNd = qkv_BN3Kd.permute(2, 0, 3, 1, 4)
    scores_BKNN = (q_BKNd * q_BKNd.shape[-1] ** -0.5) @ k_BKNd.transpose(-2, -1)
    mixed_BKNd = (scores_BKNN + bias_KNN).softmax(-1) @ v_BKNd
    mixed_BND: Tensor = attention.proj(mixed_BKNd.transpose(1, 2).reshape(batch, -1, width))
    return mixed_BND


class PlainUpdate:
    """One update after the other, as BEiT's engine makes them; tokens are given."""

    def __init__(self, model: nn.Module, work: Workload, *, bf16: bool) -> None:
        self.model, self.work, self.bf16 = model.to(work.device).train(), work, bf16
        self.optimizer = plain_adamw(model)

    def forward(self, work: Workload) -> tuple[Tensor, Tensor, Tensor]:
        """predicted_MV, target_M and the loss."""
        target_M = work.token_BN[work.mask_BN]
        with torch.autocast(work.device.type, torch.bfloat16, enabled=self.bf16):
            predicted_MV = self.model(work.image_BCHW, work.mask_BN)
            return predicted_MV, target_M, functional.cross_entropy(predicted_MV, target_M)

    def __call__(self) -> None:
        predicted_MV, target_M, loss = self.forward(self.work)
        assert math.isfinite(loss.item())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=False)
        self.optimizer.step()
        if self.work.device.type == "cuda":
            torch.cuda.synchronize()
        (predicted_MV.argmax(-1) == target_M).float().mean().item()


def plain_adamw(model: nn.Module) -> torch.optim.AdamW:
    """torch's loop over parameters, in BEiT's two groups."""
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[decays(name, parameter)].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": WEIGHT_DECAY if decay else 0.0}
            for decay, parameters in groups.items()
        ],
        lr=LR, betas=BETAS, eps=EPS, foreach=False, fused=False,
    )  # fmt: skip
