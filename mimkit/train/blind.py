"""What predictors that see no pixel score on held-out tokens: the lines that a loss is judged by.

F folds of images, N positions, V words, K different (fold, position, word) that occur.
"""

import math

import torch
from torch import Tensor

from mimkit.tokenizers._dvae_health import token_health

FOLDS = 4  # 51 MB of counts at 196 positions and 8192 words, summed over ranks once an evaluation
_STRENGTHS = tuple(4.0**power for power in range(16))  # 1 .. 1e9: by position alone .. not at all


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
        for s in _STRENGTHS
    ]
    return float(torch.stack(losses).min() / occurs_K.sum())


def _frequencies(count_FV: Tensor) -> Tensor:
    """Words' frequencies, smoothed: never 0."""
    different_F1 = (count_FV > 0).sum(1, keepdim=True).clamp_min(1)
    total_F1 = count_FV.sum(1, keepdim=True)
    return (count_FV + different_F1 / count_FV.shape[1]) / (total_F1 + different_F1)
