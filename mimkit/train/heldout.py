"""The masked-token loss on images that were never trained on, and the two lines it is judged by."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from mimkit.batch import Batch
from mimkit.tokenizers import VisualTokenizer
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
    meter, counts_V = Meter(), torch.zeros(tokenizer.vocabulary or 0, device=device)
    for batch in (padded.to(device) for padded in batches):
        predicted_MV, target_M = predict(model, tokenizer, batch, mean=mean, std=std)
        real_M = (batch.index_B >= 0)[:, None].expand_as(batch.mask_BN)[batch.mask_BN]
        predicted_MV, target_M = predicted_MV[real_M], target_M[real_M]
        # every rank adds the same names: a batch of padding only has no mean, but counts 0
        loss = tokenizer.loss(predicted_MV, target_M) if len(target_M) else counts_V.sum() * 0
        meter.add({"loss": (loss * len(target_M), len(target_M))})
        if tokenizer.vocabulary is not None:
            meter.add({"accuracy": ((predicted_MV.argmax(1) == target_M).sum(), len(target_M))})
            counts_V += torch.bincount(target_M, minlength=len(counts_V))
    model.train()
    values = {f"heldout_{name}": value for name, value in meter.means(sum_over_ranks).items()}
    if tokenizer.vocabulary is not None:
        values |= token_statistics(sum_over_ranks(counts_V))
    return values


def token_statistics(counts_V: Tensor) -> dict[str, float]:
    """What predicting without looking would score: entropy in nats of the tokens that occur, ln V,
    the share of the most frequent token, and how many different ones there are."""
    share_V = counts_V.double() / counts_V.sum()
    return {
        "unigram_entropy": float(torch.special.entr(share_V).sum()),
        "ln_vocab": math.log(len(counts_V)),
        "most_common_token": float(share_V.max()),
        "tokens_used": int((counts_V > 0).sum()),
    }
