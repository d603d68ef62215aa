"""The discrete VAE of DALL-E at any size: dall_e's encoder and decoder, always in fp32.

Shapes: B images, h w pixels, y x rows and columns of tokens (h/8, w/8), V words.
Source: dall_e's encoder.py, decoder.py, utils.py; Ramesh et al. 2021, appendix A.1.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DOWNSAMPLING = 8  # three halvings, fixed by dall_e's four groups


class Dvae(nn.Module):
    """Encoder to word logits and decoder from (relaxed) words.

    The weights are those of a fresh `torch.empty`: `make_dvae` initialises them, `load_dvae`
    fills them.

    Args:
        width: channels of the first group, doubled in each of the three that follow (DALL-E: 256);
            a multiple of 4, because a block's hidden width is a quarter of its output.
        blocks: residual blocks a group (DALL-E: 2).
        vocabulary: V, the number of words (DALL-E: 8192).
        device: where the weights lie; "meta" costs no memory.
    """

    def __init__(
        self, *, width: int, blocks: int, vocabulary: int, device: str | torch.device = "cpu"
    ) -> None:
        from dall_e import Decoder, Encoder

        super().__init__()
        # dall_e's validators return False instead of raising, so nothing would stop a bad size.
        if width < 4 or width % 4 or blocks < 1 or vocabulary < 2:
            raise ValueError(
                f"width {width}, blocks {blocks}, vocabulary {vocabulary}: the width must be a "
                "multiple of 4, blocks at least 1 and the vocabulary at least 2"
            )
        self.width, self.blocks, self.vocabulary = width, blocks, vocabulary
        size = {"n_hid": width, "n_blk_per_group": blocks, "vocab_size": vocabulary}
        # Built on meta: dall_e would draw its initial weights from the global generator.
        self.encoder = Encoder(**size, device=torch.device("meta"))
        self.decoder = Decoder(**size, device=torch.device("meta"))
        for conv in self._convolutions():
            conv.use_float16 = False  # dall_e's default on CUDA: argmax would differ on near ties
        self.to_empty(device=device)

    def logits(self, view_BChw: Tensor) -> Tensor:
        """View in [0, 1] -> logits_BVyx of the words; ValueError unless 4-D float32."""
        logits_BVyx: Tensor = self.encoder(map_pixels(view_BChw))
        return logits_BVyx

    def pixel_parameters(self, word_BVyx: Tensor) -> tuple[Tensor, Tensor]:
        """(Relaxed) one-hot words -> mean and log scale of the logit-Laplace, each B3hw."""
        mean_B3hw, log_scale_B3hw = self.decoder(word_BVyx).chunk(2, dim=1)
        return mean_B3hw, log_scale_B3hw

    def _convolutions(self) -> list[Any]:
        """dall_e's own Conv2d, with parameters `w` and `b`."""
        return [module for module in self.modules() if hasattr(module, "use_float16")]

    @torch.no_grad()
    def reset_parameters(self, *, generator: torch.Generator) -> None:
        """dall_e's initialisation, N(0, 1 / (inputs * kernel^2)) and zero biases, drawn on CPU."""
        for conv in self._convolutions():
            drawn = torch.randn(conv.w.shape, generator=generator)
            conv.w.copy_(drawn / math.sqrt(conv.w[0].numel()))
            conv.b.zero_()


def make_dvae(*, width: int, blocks: int, vocabulary: int, generator: torch.Generator) -> Dvae:
    """A new dVAE on the CPU whose initial weights are a pure function of the generator."""
    dvae = Dvae(width=width, blocks=blocks, vocabulary=vocabulary)
    dvae.reset_parameters(generator=generator)
    return dvae


def map_pixels(view_BChw: Tensor) -> Tensor:
    """[0, 1] -> [0.1, 0.9], which keeps the logit of a pixel finite (dall_e's own function)."""
    from dall_e import map_pixels as dall_e_map_pixels

    apply: Callable[[Tensor], Tensor] = dall_e_map_pixels
    return apply(view_BChw)


def reconstruct(mean_B3hw: Tensor) -> Tensor:
    """Mean of the decoder's logit-Laplace -> image in [0, 1]: sigmoid, unmapped, clamped."""
    from dall_e import unmap_pixels

    apply: Callable[[Tensor], Tensor] = unmap_pixels
    return apply(torch.sigmoid(mean_B3hw))
