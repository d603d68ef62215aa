"""An encoder with what masked image modelling adds to it."""

import torch
from torch import Tensor

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
