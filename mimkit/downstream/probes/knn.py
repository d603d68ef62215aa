"""kNN on frozen features: the cheapest question one can put to an encoder."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mimkit.downstream.features import POOLINGS, Features
from mimkit.downstream.probes import PROBES, Candidate, Candidates, Probe, Progress

TEMPERATURE = 0.07
_CHUNK = 256  # images that are compared with all others at once


@PROBES.register
class Knn(Probe):
    """Votes of the nearest training images, see `knn_votes`.

    Args:
        neighbours: numbers of them to try; one above the number of training images is cut to it.
        device: where similarities are computed.
    """

    setting = "neighbours"

    def __init__(
        self,
        *,
        neighbours: Sequence[int] = (5, 10, 20, 50, 100),
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self._neighbours, self._device = tuple(neighbours), torch.device(device)

    def candidates(self, features: Features) -> Candidates:
        return Candidates(features.layers, POOLINGS, self._neighbours)

    def logits(
        self,
        candidates: Candidates,
        train: Features,
        fit: Tensor,
        judged: Features,
        rows: Tensor,
        *,
        num_classes: int,
        progress: Progress,
    ) -> dict[Candidate, Tensor]:
        places = [(layer, pool) for layer in candidates.layers for pool in candidates.poolings]
        neighbours = [int(number) for number in candidates.settings]
        found: dict[Candidate, Tensor] = {}
        for done, (layer, pooling) in enumerate(places, start=1):
            train_BF, judged_BF = train.of(layer, pooling)[fit], judged.of(layer, pooling)[rows]
            votes = knn_votes(train_BF.to(self._device), train.label_B[fit],
                              judged_BF.to(self._device), neighbours=neighbours,
                              num_classes=num_classes)  # fmt: skip
            for number, vote_BV in votes.items():
                found[Candidate(layer, pooling, number)] = vote_logits(vote_BV)
            progress(done, len(places))
        return found


def knn_votes(
    train_BF: Tensor,
    label_B: Tensor,
    judged_BF: Tensor,
    *,
    neighbours: Sequence[int],
    num_classes: int,
) -> dict[int, Tensor]:
    """vote_BV on the CPU for each number of neighbours.

    Features are centred on the training mean; similarity is the cosine s, and each neighbour votes
    with exp(s / 0.07) (Wu et al. 2018, DINO's protocol).
    """
    most = min(max(neighbours), len(train_BF))
    mean_F = train_BF.mean(dim=0)
    train_BF = nn.functional.normalize(train_BF - mean_F, dim=1)
    votes: dict[int, list[Tensor]] = {number: [] for number in neighbours}
    for first in range(0, len(judged_BF), _CHUNK):
        unit_BF = nn.functional.normalize(judged_BF[first : first + _CHUNK] - mean_F, dim=1)
        similarity_BK, nearest_BK = (t.cpu() for t in (unit_BF @ train_BF.T).topk(most, dim=1))
        weight_BK, voter_BK = (similarity_BK / TEMPERATURE).exp(), label_B[nearest_BK]
        for number, chunks in votes.items():
            vote_BV = torch.zeros(len(unit_BF), num_classes)
            chunks.append(vote_BV.scatter_add_(1, voter_BK[:, :number], weight_BK[:, :number]))
    return {number: torch.cat(chunks) for number, chunks in votes.items()}


def vote_logits(vote_BV: Tensor) -> Tensor:
    """Logits whose softmax is the share of the votes; a class without any gets a millionth."""
    return (vote_BV / vote_BV.sum(1, keepdim=True) + 1e-6).log()
