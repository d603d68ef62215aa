"""The masked-token loss on images that were never trained on, and the lines it is judged by."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mimkit.batch import Batch, at_masked, to_unit
from mimkit.tokenizers import VisualTokenizer
from mimkit.train.blind import STRENGTHS, MeanTargets, TargetSums, TokenCounts, blind_scores
from mimkit.train.metrics import Meter
from mimkit.train.step import predict


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokenizer: VisualTokenizer,
    batches: Iterable[Batch],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Mean loss and accuracy over the masked patches of every held-out image, each counted once.

    All ranks must call it, with equal numbers of batches. Padding (index -1) goes through the model
    so that ZeRO-3's exchanges stay in step, but is not counted.
    """
    model.eval()
    meter, counts = Meter(), None
    for batch in (padded.to(device) for padded in batches):
        predicted_MV, target_M = predict(model, tokenizer, batch, mean=mean, std=std)
        image_M, position_M = batch.mask_BN.nonzero(as_tuple=True)
        index_M = batch.index_B[image_M]
        real_M = index_M >= 0
        predicted_MV, target_M = predicted_MV[real_M], target_M[real_M]
        # every rank adds the same names: a batch of padding only has no mean, but counts 0
        loss = tokenizer.loss(predicted_MV, target_M) if len(target_M) else real_M.sum() * 0.0
        meter.add({"loss": (loss * len(target_M), len(target_M))})
        if tokenizer.vocabulary is not None:
            meter.add({"accuracy": ((predicted_MV.argmax(1) == target_M).sum(), len(target_M))})
            counts = counts or TokenCounts(
                positions=batch.mask_BN.shape[1], vocabulary=tokenizer.vocabulary, device=device
            )
            counts.add(target_M, position_M[real_M], index_M[real_M])
    model.train()
    values = {f"heldout_{name}": value for name, value in meter.means(sum_over_ranks).items()}
    if counts is not None:
        values |= blind_scores(sum_over_ranks(counts.count_FNV))
    return values


@torch.no_grad()
def mean_losses(
    tokenizer: VisualTokenizer,
    batches: Callable[[], Iterable[Batch]],
    *,
    device: torch.device,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """The lines for targets that are numbers, in the tokenizer's own loss: what always predicting
    the mean of these targets costs, and what the mean by position of other images costs.

    The first is not a held-out number (no other constant has a lower squared error on them); the
    second is: as for words each image is predicted from those of other folds, see `position_loss`,
    and the pull towards the mean of all positions is the best of sixteen.

    Args:
        batches: gives the same ones at every call, twice here. All ranks call it, as `evaluate`.

    Returns:
        `mean_target_loss` and `mean_by_position_loss`; nothing where a target has other numbers
        than a prediction, so that it cannot stand for one.
    """
    sums = None
    for target_MV, position_M, index_M, positions in _targets(tokenizer, batches(), device):
        if target_MV.shape[1:] != (tokenizer.prediction_dim,):
            return {}
        sums = sums or TargetSums(positions=positions, numbers=target_MV.shape[1], device=device)
        sums.add(target_MV, position_M, index_M)
    assert sums is not None, "there are held-out images"
    means, meter = MeanTargets(sum_over_ranks(sums.sum_FNV1)), Meter()
    for target_MV, position_M, index_M, _ in _targets(tokenizer, batches(), device):
        number = len(target_MV)
        guesses = {"mean": means.of_all(number)} | {
            f"{s:g}": means.of_position(position_M, index_M, strength=s) for s in STRENGTHS
        }
        # every rank adds the same names, also for a batch of padding only
        meter.add({name: (tokenizer.loss(guess_MV, target_MV) * number if number else
                          torch.zeros((), device=device), number)
                   for name, guess_MV in guesses.items()})  # fmt: skip
    found = meter.means(sum_over_ranks)
    return {"mean_target_loss": found.pop("mean"), "mean_by_position_loss": min(found.values())}


def _targets(
    tokenizer: VisualTokenizer, batches: Iterable[Batch], device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """target_MV, position_M and index_M of the masked patches without padding; N positions."""
    for batch in (padded.to(device) for padded in batches):
        image_M, position_M = batch.mask_BN.nonzero(as_tuple=True)
        index_M = batch.index_B[image_M]
        real_M = index_M >= 0
        target_M = at_masked(tokenizer.encode(to_unit(batch.token_view_BChw)), batch.mask_BN, None)
        yield target_M[real_M], position_M[real_M], index_M[real_M], batch.mask_BN.shape[1]
