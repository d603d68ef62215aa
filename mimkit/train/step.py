"""The algorithm on one screen: one micro-batch of BEiT."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mimkit.batch import Batch, normalise, to_unit
from mimkit.tokenizers import VisualTokenizer


class StepResult(NamedTuple):
    """The loss to go backward from, and what to report: name -> (sum, number of things summed)."""

    loss: Tensor
    sums: dict[str, tuple[Tensor, int]]


def predict(
    model: nn.Module,
    tokenizer: VisualTokenizer,
    batch: Batch,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    keep_LB2R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """predicted_MV in fp32 and target_M: the masked patches of the batch, image by image.

    Targets are the batch's tokens where it has some out of a bank.
    """
    if batch.token_BN.numel():
        target_M = batch.token_BN[batch.mask_BN].long()
    else:
        with torch.no_grad():
            target_M = tokenizer.encode(to_unit(batch.token_view_BChw))[batch.mask_BN]
    image_BCHW = normalise(batch.patch_view_BCHW, mean=mean, std=std)
    return model(image_BCHW, batch.mask_BN, keep_LB2R).float(), target_M


def mim_step(
    model: nn.Module,
    tokenizer: VisualTokenizer,
    batch: Batch,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    keep_LB2R: Tensor | None,
) -> StepResult:
    """Predicts the tokens of the masked patches from the image whose masked tokens are replaced.

    The loss is the mean over all masked tokens of the micro-batch, not an average of images
    (BEiT, run_beit_pretraining).
    """
    predicted_MV, target_M = predict(
        model, tokenizer, batch, mean=mean, std=std, keep_LB2R=keep_LB2R
    )
    loss = tokenizer.loss(predicted_MV, target_M)
    sums = {"loss": (loss.detach() * len(target_M), len(target_M))}
    if tokenizer.vocabulary is not None:
        correct = (predicted_MV.detach().argmax(dim=1) == target_M).sum()
        sums["accuracy"] = (correct, len(target_M))
    return StepResult(loss, sums)
