"""The algorithm on one screen: one micro-batch of supervised training, and one evaluation."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from timm.loss.binary_cross_entropy import BinaryCrossEntropy
from timm.loss.cross_entropy import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from mimkit.batch import Batch, normalise
from mimkit.train.mixing import Mixing
from mimkit.train.step import StepResult

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits_BV, labels (B,) or shares (B, V)) -> mean


def make_loss(
    name: Literal["cross_entropy", "bce"], *, mixing: Mixing, threshold: float | None
) -> Loss:
    """timm's losses.

    Args:
        threshold: of "bce": classes whose share is above it count as present, None keeps shares.
            DeiT's code has 0, RSB 0.2.
    """
    if name == "bce":
        smooth = 0.0 if mixing.mixes else mixing.smoothing  # mixing smooths what it mixes
        return BinaryCrossEntropy(smooth, target_threshold=threshold)
    if mixing.mixes:
        return SoftTargetCrossEntropy()  # type: ignore[no-untyped-call]
    return LabelSmoothingCrossEntropy(mixing.smoothing)  # type: ignore[no-untyped-call]


def classification_step(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss,
    mixing: Mixing,
    update: int,
    rows: slice,
    keep_LB2R: Tensor | None,
    mean: Sequence[float],
    std: Sequence[float],
) -> StepResult:
    """Normalise, erase, mix, predict.

    The accuracy is about the class with the largest share, so mixing keeps it low.
    """
    image_BCHW = normalise(batch.patch_view_BCHW, mean=mean, std=std)
    image_BCHW, target = mixing(image_BCHW, batch.label_B, update=update, rows=rows)
    logits_BV = model(image_BCHW, keep_LB2R).float()
    value = loss(logits_BV, target)
    main_B = target if target.ndim == 1 else target.argmax(1)
    correct, count = (logits_BV.detach().argmax(1) == main_B).sum(), len(main_B)
    return StepResult(value, {"loss": (value.detach() * count, count),
                              "accuracy": (correct, count)})  # fmt: skip


class Predicted(NamedTuple):
    """Of every image of a source, in its order; on the CPU. K classes, the best first."""

    best_NK: Tensor  # int64
    log_confidence_N: Tensor  # float32, of the best class
    log_probability_N: Tensor  # float32, of the label


@torch.no_grad()
def predict_all(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    images: int,
    best: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> Predicted:
    """What the model, in eval mode, says of each image. All ranks call it and get all of it.

    Every rank fills in its own rows and the sum puts them together, so the numbers are the same on
    any number of ranks. Padding (index -1) goes through the model and is dropped.

    Args:
        images: N, of the source. best: K.
    """
    model.eval()
    # float64 holds class numbers exactly, so one exchange does for all
    found_NF = torch.zeros(images, best + 2, dtype=torch.float64, device=device)
    for batch in (padded.to(device) for padded in batches):
        image_BCHW = normalise(batch.patch_view_BCHW, mean=mean, std=std)
        log_BV = model(image_BCHW).float().log_softmax(1)
        confidence_BK, best_BK = log_BV.topk(best, dim=1)
        label_B1 = batch.label_B[:, None]
        row_BF = torch.cat([best_BK, confidence_BK[:, :1], log_BV.gather(1, label_B1)], 1)
        real_B = batch.index_B >= 0
        found_NF[batch.index_B[real_B]] = row_BF[real_B].double()
    model.train()
    found_NF = sum_over_ranks(found_NF).cpu()
    return Predicted(found_NF[:, :best].long(), found_NF[:, best].float(),
                     found_NF[:, best + 1].float())  # fmt: skip
