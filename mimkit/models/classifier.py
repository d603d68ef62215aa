"""An encoder and one linear layer: image_BCHW -> logits_BV."""

import torch
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.models.blocks import EPS
from mimkit.models.encoder import ImageEncoder
from mimkit.models.init import STD, truncated_normal
from mimkit.models.positions import per_block
from mimkit.random import Purpose, torch_generator


class ImageClassifier(nn.Module):
    """image_BCHW (normalised) -> logits_BV.

    It takes `model` over, sharing its weights; the names of the parts are the encoder's own.

    Args:
        num_classes: V.
        pooling: "mean" of the patch tokens, through a fresh norm in place of the encoder's last
            one, which is dropped (BEiT's finetuning); or "cls", the class token after that one.
    """

    def __init__(self, model: ImageEncoder, *, num_classes: int, pooling: str) -> None:
        super().__init__()
        self.stem, self.encoder, self.pooling = model.stem, model.encoder, pooling
        if pooling == "mean":
            self.encoder.norm = nn.Identity()
        normed = isinstance(self.encoder.norm, nn.LayerNorm)
        width = self.encoder.width
        self.pool_norm = nn.Identity() if normed else nn.LayerNorm(width, eps=EPS)
        self.head = nn.Linear(width, num_classes)
        self.still_stem = False  # its batch norms stay in eval mode, whatever `train` says

    def forward(self, image_BCHW: Tensor, keep_LB2R: Tensor | None = None) -> Tensor:
        tokens_BND = self.encoder(self.stem(image_BCHW), keep_LB2R)
        pooled_BD = tokens_BND[:, 1:].mean(1) if self.pooling == "mean" else tokens_BND[:, 0]
        logits_BV: Tensor = self.head(self.pool_norm(pooled_BD))
        return logits_BV

    def train(self, mode: bool = True) -> "ImageClassifier":
        """As of every module, but a stem that does not train keeps its running statistics."""
        super().train(mode)
        if self.still_stem:
            self.stem.eval()
        return self

    @property
    def image_encoder(self) -> ImageEncoder:
        """The stem and the encoder, sharing their weights with this model."""
        return ImageEncoder(self.stem, self.encoder)

    @torch.no_grad()
    def initialise_head(self, *, seed: int, scale: float) -> None:
        """Truncated normal of std 0.02 times `scale`; no bias (BEiT's init_scale: 0.001)."""
        draw = torch_generator(Purpose.INIT, seed=seed)
        weight_VD = truncated_normal(torch.empty(self.head.weight.shape), draw, std=STD)
        self.head.weight.copy_(weight_VD * scale)
        self.head.bias.zero_()

    def head_state(self) -> dict[str, Tensor]:
        """What is not the encoder's: norm and linear layer."""
        return {name: weight for name, weight in self.state_dict().items()
                if name.startswith(HEAD)}  # fmt: skip


HEAD = ("pool_norm.", "head.")


def with_bias_per_block(model: ImageEncoder) -> ImageEncoder:
    """A shared relative bias copied into one a block, as BEiT finetunes; others as they are."""
    if model.encoder.positions == "relative_shared":
        model.encoder.relative = per_block(model.encoder.relative[0], depth=model.encoder.depth)
        model.encoder.positions = "relative"
    return model


def check_classes(heads: int, *, classes: int, where: str) -> None:
    """UserError where a head that is taken over has another number of classes than the data."""
    if heads != classes:
        raise UserError(
            f"the head of {where} has {heads} classes and the data {classes}; set "
            "model.fresh_head=true to start with a new one, or give the data it was trained on"
        )
