"""What a VQ-KD is trained on: a teacher's features out of codes, and a codebook that follows.

Source: Peng et al. 2022 (BEiT v2), section 3.1; norm_ema_quantizer.py. Reviving is ours.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mimkit.tokenizers._revival import dead_and_sources, near
from mimkit.tokenizers._vqkd_model import Vqkd, VqkdDecoder

Judge = Callable[[Tensor, Tensor], Tensor]  # (predicted_MV, target_MV) -> mean loss


class Statistics(NamedTuple):
    """Of the tokens since the last update of the codebook: sums, so ranks can add theirs."""

    count_V: Tensor
    direction_VC: Tensor


class VqkdTrainee(nn.Module):
    """Both halves with their loss as `forward`; the codebook is no parameter but follows tokens.

    `share_V`, how much each code was used lately, travels with it in checkpoints; the statistics of
    the tokens that went forward are taken after each update, before a checkpoint is written.
    """

    share_V: Tensor
    count_V: Tensor
    direction_VC: Tensor

    def __init__(self, vqkd: Vqkd, decoder: VqkdDecoder, judge: Judge) -> None:
        super().__init__()
        self.vqkd, self.decoder, self.judge = vqkd, decoder, judge
        codes = vqkd.codebook_VC
        self.register_buffer("share_V", torch.full((len(codes),), 1 / len(codes)))
        self.register_buffer("count_V", torch.zeros(len(codes)), persistent=False)
        self.register_buffer("direction_VC", torch.zeros_like(codes), persistent=False)

    def forward(
        self, view_BChw: Tensor, feature_BNV: Tensor, *, commitment: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The teacher's loss plus commitment, and detached scalars of both.

        Gradients pass from the code to the token as if they were the same (straight through).

        Args:
            view_BChw: float32 in [0, 1].
            feature_BNV: the teacher's.
            commitment: weight of the mean squared distance of tokens from their codes (beta, 1).
        """
        direction_BNC = self.vqkd.directions(view_BChw)
        target_BN = self.vqkd.nearest(direction_BNC.detach())
        self._remember(direction_BNC.detach(), target_BN)
        code_BNC = self.vqkd.codebook_VC[target_BN]
        committed = nn.functional.mse_loss(direction_BNC, code_BNC)
        through_BNC = direction_BNC + (code_BNC - direction_BNC).detach()
        predicted_BNV = self.decoder(through_BNC)
        distilled = self.judge(predicted_BNV.flatten(0, 1), feature_BNV.flatten(0, 1))
        parts = {"distillation": distilled.detach(), "commitment": committed.detach()}
        return distilled + commitment * committed, parts

    def _remember(self, direction_BNC: Tensor, target_BN: Tensor) -> None:
        token_M, codes = target_BN.flatten(), len(self.count_V)
        self.count_V += torch.bincount(token_M, minlength=codes)
        self.direction_VC.index_add_(0, token_M, direction_BNC.flatten(0, 1))

    def taken_statistics(self) -> Statistics:
        """Those since the last call; they start again from zero."""
        taken = Statistics(self.count_V.clone(), self.direction_VC.clone())
        self.count_V.zero_()
        self.direction_VC.zero_()
        return taken


@torch.no_grad()
def update_codebook(
    trainee: VqkdTrainee,
    statistics: Statistics,
    *,
    decay: float,
    revive: float,
    generator: torch.Generator,
) -> int:
    """Codes move towards the mean of their tokens; codes that nobody uses start again elsewhere.

    A code that had no token stays where it was (BEiT v2). One whose share of the tokens, averaged
    with the same decay, is below `revive` times an equal share becomes a neighbour of one of the
    most used, and they share its tokens from then on.

    Args:
        statistics: of all ranks.
        decay: of the averages (BEiT v2: 0.99).
        revive: 0 leaves dead codes dead, as BEiT v2 does.
        generator: on the CPU, the same on every rank.

    Returns:
        How many codes started again.
    """
    code_VC, share_V = trainee.vqkd.codebook_VC, trainee.share_V
    mean_VC = nn.functional.normalize(statistics.direction_VC, dim=1)
    moved_VC = nn.functional.normalize(decay * code_VC + (1 - decay) * mean_VC, dim=1)
    code_VC.copy_(torch.where(statistics.count_V[:, None] > 0, moved_VC, code_VC))
    dead_X, source_X = dead_and_sources(share_V, statistics.count_V, decay=decay, revive=revive)
    again_XC = near(code_VC[source_X], generator=generator)
    code_VC[dead_X] = nn.functional.normalize(again_XC, dim=1)
    return len(dead_X)


@torch.no_grad()
def cluster(
    trainee: VqkdTrainee, view_BChw: Tensor, *, generator: torch.Generator, rounds: int = 10
) -> None:
    """Sets the codebook to the centres of the views' tokens: k-means by cosine, BEiT v2's start.

    A centre that gets no token stays where it was. On the CPU, so that all ranks get the same.
    """
    token_MC = trainee.vqkd.directions(view_BChw).flatten(0, 1)
    codes = len(trainee.share_V)
    if len(token_MC) >= codes:
        first_V = torch.randperm(len(token_MC), generator=generator)[:codes]
    else:
        first_V = torch.randint(len(token_MC), (codes,), generator=generator)
    code_VC = trainee.vqkd.codebook_VC
    code_VC.copy_(token_MC[first_V])
    for _ in range(rounds):
        target_M = trainee.vqkd.nearest(token_MC)
        sum_VC = torch.zeros_like(code_VC).index_add_(0, target_M, token_MC)
        used_V1 = torch.bincount(target_M, minlength=codes)[:, None] > 0
        code_VC.copy_(torch.where(used_V1, nn.functional.normalize(sum_VC, dim=1), code_VC))
