"""An encoder with what stands on it: the head of pretraining, or a classifier."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mimkit.models.classifier import ImageClassifier
from mimkit.models.encoder import ImageEncoder
from mimkit.models.mim import MaskedImageModel


class EncoderWithHead(ImageEncoder):
    """An encoder that has what pretraining adds: the mask token, put in after the stem, and a head.

    As an encoder it gives tokens like any other.
    """

    def __init__(self, model: MaskedImageModel) -> None:
        super().__init__(model.stem, model.encoder)
        self.mask_token, self.head = model.mask_token, model.head

    def predictions(self, image_BCHW: Tensor, mask_BN: Tensor) -> Tensor:
        """predicted_MV at the masked patches, as MaskedImageModel gives them."""
        tokens_BND = torch.where(mask_BN[..., None], self.mask_token, self.stem(image_BCHW))
        predicted_MV: Tensor = self.head(self.encoder(tokens_BND)[:, 1:][mask_BN])
        return predicted_MV

    def example_mask(self, batch: int) -> Tensor:
        """Every other patch, other ones in every other image."""
        rows, columns = self.encoder.grid
        number_BN = torch.arange(rows * columns) + torch.arange(batch)[:, None]
        return number_BN % 2 == 0


class EncoderWithClassifier(ImageEncoder):
    """An encoder with the norm and the linear layer of a finetuned model.

    Args:
        classes: their names, or empty.

    Attributes:
        pool_norm: behind pooling; Identity where the encoder's own norm stands before it.
        pooling: "mean" of the patch tokens, or "cls".
    """

    def __init__(self, model: ImageClassifier, *, classes: Sequence[str] = ()) -> None:
        super().__init__(model.stem, model.encoder)
        self.pool_norm, self.head, self.pooling = model.pool_norm, model.head, model.pooling
        self.classes = list(classes)
        if classes and len(classes) != self.num_classes:
            raise ValueError(f"{len(classes)} names for a head of {self.num_classes} classes")

    @property
    def num_classes(self) -> int:
        return self.head.out_features

    @property
    def normed_first(self) -> bool:
        """Whether the norm may as well stand before pooling: it is of the class token alone."""
        return self.pooling == "cls"

    @property
    def has_pool_norm(self) -> bool:
        return isinstance(self.pool_norm, nn.LayerNorm)

    def logits(self, image_BCHW: Tensor) -> Tensor:
        """logits_BV, as ImageClassifier gives them."""
        tokens_BND = self(image_BCHW)
        pooled_BD = tokens_BND[:, 1:].mean(1) if self.pooling == "mean" else tokens_BND[:, 0]
        logits_BV: Tensor = self.head(self.pool_norm(pooled_BD))
        return logits_BV


def has_norm(model: ImageEncoder) -> bool:
    """Whether there is a norm behind the last block of the encoder itself."""
    return isinstance(model.encoder.norm, nn.LayerNorm)


def classes_said(model: ImageEncoder) -> dict[str, str]:
    """For the metadata of a file: names of classes, where there are any."""
    if not isinstance(model, EncoderWithClassifier) or not model.classes:
        return {}
    return {"classes": json.dumps(model.classes)}
