"""The masked-token loss on images that were never trained on, and the lines it is judged by."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from mimkit.batch import Batch
from mimkit.tokenizers import VisualTokenizer
from mimkit.train.blind import TokenCounts, blind_scores
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
