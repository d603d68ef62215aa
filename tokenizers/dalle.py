"""The tokenizer of DALL-E, which BEiT predicts: one of 8192 words for every 8 x 8 pixels.

The weights are OpenAI's and are not distributed with mimkit; `mimkit convert_dalle` reads them.
Source: Ramesh et al. 2021; dall_e's encoder.py, decoder.py, utils.py.
"""

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS
from mimkit.tokenizers._dalle_file import load_dalle
from mimkit.tokenizers._dalle_weights import DalleWeights, Part
from mimkit.tokenizers._dvae_model import map_pixels, reconstruct
from mimkit.tokenizers._words import Precision, WordTokenizer, computing_in


@TOKENIZERS.register
class DalleTokenizer(WordTokenizer):
    """Frozen and in eval mode; a 112-pixel view gives 14 x 14 words.

    Args:
        path: the encoder: OpenAI's encoder.pkl, OpenMMLab's dalle_encoder.pth (neither is
            executed), or the safetensors that `mimkit convert_dalle` makes of them.
        decoder: the decoder, likewise, for pictures; it is not read unless it is given.
        precision: of the encoder. fp32 gives the same words everywhere but for ties within
            rounding, which stored tokens need; fp16 is what dall_e does on CUDA by itself. All but
            the last convolution runs in it: rounded logits would tie.

    Raises:
        UserError: a file is missing, cut short, asks for code, or is not what it should be.
    """

    prediction_dim: int
    vocabulary: int
    precision: Precision
    decoder: nn.Module | None

    def __init__(
        self, *, path: str, decoder: str | None = None, precision: Precision = "fp32"
    ) -> None:
        super().__init__()
        encoder = _load(path, "encoder", setting="path")
        self.encoder: Any = encoder.network()
        self.decoder = None
        if decoder is not None:
            self.decoder = _decoder(decoder, encoder).network()
        self.prediction_dim = self.vocabulary = encoder.vocabulary
        self.precision = precision
        decides = f"dalle {encoder.sha256} {precision} 0.8 * x + 0.1"
        self.fingerprint = hashlib.sha256(decides.encode()).hexdigest()
        self.freeze()

    def encode(self, view_BChw: Tensor) -> Tensor:
        """float32 in [0, 1] -> the likeliest word of each patch, int64, row by row; target_BN."""
        return self.words(view_BChw, precision=self.precision)

    @torch.no_grad()
    def words(self, view_BChw: Tensor, *, precision: Precision) -> Tensor:
        """`encode` in another precision than its own; target_BN."""
        self.grid(view_BChw.shape[-2], view_BChw.shape[-1])
        _warn_if_slow(precision, view_BChw.device)
        *groups, output = self.encoder.blocks
        hidden_BDyx = map_pixels(view_BChw)
        with computing_in(precision, view_BChw.device):
            for group in groups:
                hidden_BDyx = group(hidden_BDyx)
        with computing_in("fp32", view_BChw.device):
            return output(hidden_BDyx.float()).argmax(dim=1).flatten(1)

    @property
    def can_decode(self) -> bool:
        return self.decoder is not None

    @torch.no_grad()
    def decode(self, target_BN: Tensor, grid: Grid) -> Tensor:
        """Words -> image_BChw in [0, 1], the mean of the decoder's density, in fp32.

        Raises:
            UserError: no decoder was given.
        """
        if self.decoder is None:
            raise UserError(
                "tokenizer 'dalle' was given no decoder and can not draw its words; set "
                "tokenizer.decoder to decoder.pkl or what `mimkit convert_dalle` made of it"
            )
        target_Byx = target_BN.view(-1, *grid)
        word_BVyx = nn.functional.one_hot(target_Byx, self.vocabulary).permute(0, 3, 1, 2)
        with computing_in("fp32", target_BN.device):
            mean_B3hw, _ = self.decoder(word_BVyx.float()).chunk(2, dim=1)
            return reconstruct(mean_B3hw)


def precision_differences(
    tokenizer: DalleTokenizer, view_BChw: Tensor, precisions: Sequence[Precision]
) -> dict[Precision, float]:
    """The share of the views' words that each precision changes against fp32."""
    exact_BN, differences = tokenizer.words(view_BChw, precision="fp32"), {}
    for precision in precisions:
        word_BN = tokenizer.words(view_BChw, precision=precision)
        differences[precision] = float((word_BN != exact_BN).float().mean())
    return differences


def is_slow(precision: Precision, device: torch.device) -> bool:
    """fp16 on a CPU without its instructions: 18 s a view of 112 pixels on two cores, fp32 1.5."""
    if precision != "fp16" or device.type != "cpu":
        return False
    mkldnn = torch.backends.mkldnn.is_available()
    return not (mkldnn and torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _warn_if_slow(precision: Precision, device: torch.device) -> None:
    if is_slow(precision, device):
        warnings.warn(
            "tokenizer.precision=fp16 is some ten times slower than fp32 on this CPU, which has no "
            "instructions for it; set tokenizer.precision=fp32 or bf16, or use a GPU",
            stacklevel=3,
        )


def _load(path: str, part: Part, *, setting: str) -> DalleWeights:
    loaded = load_dalle(Path(path).expanduser())
    if loaded.part != part:
        raise UserError(
            f"tokenizer.{setting}={path} holds DALL-E's {loaded.part}, but {setting} takes its "
            f"{part}: set tokenizer.path to the encoder and tokenizer.decoder to the decoder"
        )
    return loaded


def _decoder(path: str, encoder: DalleWeights) -> DalleWeights:
    decoder = _load(path, "decoder", setting="decoder")
    if decoder.vocabulary != encoder.vocabulary:
        raise UserError(
            f"tokenizer.decoder={path} draws {decoder.vocabulary} words, but the encoder of "
            f"tokenizer.path knows {encoder.vocabulary}: they are not of the same dVAE"
        )
    return decoder
