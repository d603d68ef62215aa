"""The algorithm on one screen: one micro-batch of BEiT."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mimkit.batch import Batch, at_masked, normalise, to_unit
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
    num_masked: int | None = None,
) -> tuple[Tensor, Tensor]:
    """predicted_MV in fp32 and target_M: the masked patches of the batch, image by image.

    Targets are the batch's tokens where it has some out of a bank. With `num_masked` (see
    `at_masked`) no shape depends on the data, and a GPU is not waited for.
    """
    if batch.token_BN.numel():
        target_M = at_masked(batch.token_BN, batch.mask_BN, num_masked).long()
    else:
        with torch.no_grad():
            target_BN = tokenizer.encode(to_unit(batch.token_view_BChw))
        target_M = at_masked(target_BN, batch.mask_BN, num_masked)
    image_BCHW = normalise(batch.patch_view_BCHW, mean=mean, std=std)
    predicted_MV = model(image_BCHW, batch.mask_BN, keep_LB2R, num_masked=num_masked)
    return predicted_MV.float(), target_M


def mim_step(
    model: nn.Module,
    tokenizer: VisualTokenizer,
    batch: Batch,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    keep_LB2R: Tensor | None,
    num_masked: int | None = None,
) -> StepResult:
    """Predicts the tokens of the masked patches from the image whose masked tokens are replaced.

    The loss is the mean over all masked tokens of the micro-batch, not an average of images
    (BEiT, run_beit_pretraining).
    """
    predicted_MV, target_M = predict(
        model, tokenizer, batch, mean=mean, std=std, keep_LB2R=keep_LB2R, num_masked=num_masked
    )
    loss = tokenizer.loss(predicted_MV, target_M)
    sums = {"loss": (loss.detach() * len(target_M), len(target_M))}
    if tokenizer.vocabulary is not None:
        correct = (predicted_MV.detach().argmax(dim=1) == target_M).sum()
        sums["accuracy"] = (correct, len(target_M))
    return StepResult(loss, sums)
