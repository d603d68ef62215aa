"""The discrete VAE of DALL-E as a visual tokenizer: one word of V for every 8 x 8 pixels.

Trained here by `tools/train_tokenizer.py`. Source: Ramesh et al. 2021; used as in BEiT.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.tokenizers import TOKENIZERS
from mimkit.tokenizers._dvae_file import DvaeSettings, load_dvae
from mimkit.tokenizers._dvae_model import reconstruct
from mimkit.tokenizers._fingerprint import fingerprint
from mimkit.tokenizers._network_file import trained_file
from mimkit.tokenizers._words import WordTokenizer, computing_in

EMBEDDED = Path(__file__).parent / "weights" / "dvae-embedded.safetensors"


@TOKENIZERS.register
class DvaeTokenizer(WordTokenizer):
    """Frozen dVAE; always in eval mode and in fp32, also under autocast and on CUDA.

    Args:
        path: a safetensors file that `tools/train_tokenizer.py` wrote, or its run folder, or
            "embedded" for the small one that travels with mimkit.

    Raises:
        UserError: the file is missing, text, a pickle, cut short, or holds something else.
    """

    prediction_dim: int
    vocabulary: int
    settings: DvaeSettings  # sizes, and how it was trained

    def __init__(self, *, path: str) -> None:
        super().__init__()
        self.dvae, self.settings = load_dvae(EMBEDDED if path == "embedded" else trained_file(path))
        self.prediction_dim = self.vocabulary = self.dvae.vocabulary
        decides = self.settings.model_dump_json(exclude={"training"})  # not how they came to be
        self.fingerprint = fingerprint(decides, self.dvae)
        self.freeze()

    @torch.no_grad()
    def encode(self, view_BChw: Tensor) -> Tensor:
        """float32 in [0, 1] -> the likeliest word of each patch, int64, row by row; target_BN."""
        self.grid(view_BChw.shape[-2], view_BChw.shape[-1])
        with computing_in("fp32", view_BChw.device):
            return self.dvae.logits(view_BChw).argmax(dim=1).flatten(1)

    @torch.no_grad()
    def decode(self, target_BN: Tensor, grid: Grid) -> Tensor:
        """Words -> image_BChw in [0, 1], the mean of the decoder's density."""
        target_Byx = target_BN.view(-1, *grid)
        word_BVyx = nn.functional.one_hot(target_Byx, self.vocabulary).permute(0, 3, 1, 2)
        with computing_in("fp32", target_BN.device):
            mean_B3hw, _ = self.dvae.pixel_parameters(word_BVyx.float())
            return reconstruct(mean_B3hw)
