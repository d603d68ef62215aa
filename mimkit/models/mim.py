"""Masked image modelling as in BEiT: stem, mask token, encoder, head at the masked patches."""

import torch
from torch import Tensor, nn

from mimkit.batch import at_masked
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.mask_at import MaskAt
from mimkit.models.mask_at.after_stem import AfterStem
from mimkit.models.stems import Stem


class MaskedImageModel(nn.Module):
    """(image_BCHW, mask_BN) -> predicted_MV of the batch's M masked patches, sample by sample.

    `mask_at` says where the mask acts; None is after the stem, the paper's placement.
    """

    def __init__(
        self,
        *,
        stem: Stem,
        encoder: Encoder,
        prediction_dim: int,
        mask_at: MaskAt | None = None,
    ) -> None:
        super().__init__()
        if stem.width != encoder.width:
            raise ValueError(f"the stem's width is {stem.width}, the encoder's {encoder.width}")
        self.stem = stem
        self.encoder = encoder
        self.mask_at = mask_at or AfterStem()
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder.width))
        self.head = nn.Linear(encoder.width, prediction_dim)

    def forward(
        self,
        image_BCHW: Tensor,
        mask_BN: Tensor,
        keep_LB2R: Tensor | None = None,
        *,
        num_masked: int | None = None,
    ) -> Tensor:
        """`num_masked`: of every image, where that is known (see `at_masked`)."""
        tokens_BND = self.mask_at.tokens(self.stem, image_BCHW, mask_BN, self.mask_token)
        encoded_BND = self.encoder(tokens_BND, keep_LB2R)[:, 1:]
        predicted_MV: Tensor = self.head(at_masked(encoded_BND, mask_BN, num_masked))
        return predicted_MV

    @property
    def image_encoder(self) -> ImageEncoder:
        """The stem and the encoder, sharing their weights with this model."""
        return ImageEncoder(self.stem, self.encoder)
