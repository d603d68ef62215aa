"""What predictors that see no pixel score on held-out targets: the lines that a loss is judged by.

F folds of images, N positions, V words (or numbers of a target), K different (fold, position, word)
that occur, S strengths.
"""

import math

import torch
from torch import Tensor

from mimkit.tokenizers._dvae_health import token_health

FOLDS = 4  # 51 MB of counts at 196 positions and 8192 words, summed over ranks once an evaluation
STRENGTHS = tuple(4.0**power for power in range(16))  # 1 .. 1e9: by position alone .. not at all


class TokenCounts:
    """How often each word was the target, by fold of its image and by position."""

    def __init__(self, *, positions: int, vocabulary: int, device: torch.device) -> None:
        self.count_FNV = torch.zeros(FOLDS, positions, vocabulary, device=device)

    def add(self, target_M: Tensor, position_M: Tensor, index_M: Tensor) -> None:
        """Words, where in their image they stand, and the numbers of their images."""
        _, positions, vocabulary = self.count_FNV.shape
        cell_M = ((index_M % FOLDS) * positions + position_M) * vocabulary + target_M
        self.count_FNV.view(-1).index_add_(0, cell_M, torch.ones_like(cell_M, dtype=torch.float32))


def blind_scores(count_FNV: Tensor) -> dict[str, float]:
    """The unigram entropy (nats) of the tokens, `position_loss`, ln V, the share of the most
    frequent token, and how many different ones there are."""
    health = token_health(count_FNV.sum((0, 1)))
    return {
        "unigram_entropy": health.entropy,
        "position_loss": position_loss(count_FNV),
        "ln_vocab": math.log(health.vocabulary),
        "most_common_token": health.top_share,
        "tokens_used": health.codes_used,
    }


def position_loss(count_FNV: Tensor) -> float:
    """Cross-entropy in nats of predicting each token from its position alone.

    Every image is predicted from the images of the other folds, so it is a held-out number, and on
    few images it may exceed the unigram entropy, which is not one. At position n a word has the
    probability (c_n + s u) / (C_n + s): counts there, drawn towards the words' frequencies u, which
    are themselves smoothed towards 1 / V by Witten and Bell's rule (the number of different words
    seen is the weight of 1 / V). The strength s is the best of sixteen powers of four: one number
    fitted to all tokens, in favour of this predictor.
    """
    fold_K, place_K, word_K = count_FNV.nonzero(as_tuple=True)
    count_FNV = count_FNV.double()
    occurs_K = count_FNV[fold_K, place_K, word_K]
    here_K = count_FNV.sum(0)[place_K, word_K] - occurs_K
    everything_here_K = (count_FNV.sum((0, 2)) - count_FNV.sum(2))[fold_K, place_K]
    frequency_K = _frequencies(count_FNV.sum((0, 1)) - count_FNV.sum(1))[fold_K, word_K]
    losses = [
        -(occurs_K * ((here_K + s * frequency_K) / (everything_here_K + s)).log()).sum()
        for s in STRENGTHS
    ]
    return float(torch.stack(losses).min() / occurs_K.sum())


def _frequencies(count_FV: Tensor) -> Tensor:
    """Words' frequencies, smoothed: never 0."""
    different_F1 = (count_FV > 0).sum(1, keepdim=True).clamp_min(1)
    total_F1 = count_FV.sum(1, keepdim=True)
    return (count_FV + different_F1 / count_FV.shape[1]) / (total_F1 + different_F1)


class TargetSums:
    """Sums of targets that are numbers, and how many there are, by fold of their image and by
    position: double, the last column of `sum_FNV1` is the count."""

    def __init__(self, *, positions: int, numbers: int, device: torch.device) -> None:
        self.sum_FNV1 = torch.zeros(
            FOLDS, positions, numbers + 1, device=device, dtype=torch.float64
        )

    def add(self, target_MV: Tensor, position_M: Tensor, index_M: Tensor) -> None:
        """Targets, where in their image they stand, and the numbers of their images."""
        _, positions, width = self.sum_FNV1.shape
        cell_M = (index_M % FOLDS) * positions + position_M
        one_M1 = torch.ones_like(cell_M, dtype=torch.float64)[:, None]
        counted_MV1 = torch.cat([target_MV.double(), one_M1], dim=1)
        self.sum_FNV1.view(-1, width).index_add_(0, cell_M, counted_MV1)


class MeanTargets:
    """Predicts the mean of all targets, or that of their position in the images of other folds.

    Args:
        sum_FNV1: of `TargetSums`, over all ranks.
    """

    def __init__(self, sum_FNV1: Tensor) -> None:
        self._here_FNV1 = sum_FNV1.sum(0) - sum_FNV1
        self._mean_FV = _mean(self._here_FNV1.sum(1))
        self._mean_V = _mean(sum_FNV1.sum((0, 1)))

    def of_all(self, number: int) -> Tensor:
        """So many times; float32."""
        return self._mean_V.float().expand(number, -1)

    def of_position(self, position_M: Tensor, index_M: Tensor, *, strength: float) -> Tensor:
        """predicted_MV: the means there, drawn towards the mean of all positions as if that had
        been seen `strength` times more; float32."""
        fold_M = index_M % FOLDS
        here_MV1 = self._here_FNV1[fold_M, position_M]
        sum_MV = here_MV1[:, :-1] + strength * self._mean_FV[fold_M]
        return (sum_MV / (here_MV1[:, -1:] + strength)).float()


def _mean(sum_V1: Tensor) -> Tensor:
    return sum_V1[..., :-1] / sum_V1[..., -1:].clamp_min(1)
