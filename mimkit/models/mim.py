"""Masked image modelling as in BEiT: stem, mask token, encoder, head at the masked patches."""

import torch
from torch import Tensor, nn

from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.stems import Stem


class MaskedImageModel(nn.Module):
    """(image_BCHW, mask_BN) -> predicted_MV of the batch's M masked patches, sample by sample.

    The stem sees the whole image; masked patches' tokens are replaced after it (the mission's
    protocol, and the paper's for convolutional stems). What of the pixels under the mask still
    reaches visible tokens depends on the stem: nothing for patchwise stems without batch
    statistics.
    """

    def __init__(self, *, stem: Stem, encoder: Encoder, prediction_dim: int) -> None:
        super().__init__()
        if stem.width != encoder.width:
            raise ValueError(f"the stem's width is {stem.width}, the encoder's {encoder.width}")
        self.stem = stem
        self.encoder = encoder
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder.width))
        self.head = nn.Linear(encoder.width, prediction_dim)

    def forward(
        self, image_BCHW: Tensor, mask_BN: Tensor, keep_LB2: Tensor | None = None
    ) -> Tensor:
        tokens_BND = torch.where(mask_BN[..., None], self.mask_token, self.stem(image_BCHW))
        encoded_BND = self.encoder(tokens_BND, keep_LB2)[:, 1:]
        predicted_MV: Tensor = self.head(encoded_BND[mask_BN])
        return predicted_MV

    @property
    def image_encoder(self) -> ImageEncoder:
        """The stem and the encoder, sharing their weights with this model."""
        return ImageEncoder(self.stem, self.encoder)
