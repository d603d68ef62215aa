"""VQ-KD, BEiT v2's tokenizer: codes whose patches mean the same to a teacher, not look the same.

Trained here by `tools/train_tokenizer.py --config vqkd`. Source: Peng et al. 2022 (BEiT v2).
"""

import torch
from torch import Tensor

from mimkit.batch import Grid
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer
from mimkit.tokenizers._fingerprint import fingerprint
from mimkit.tokenizers._network_file import trained_file
from mimkit.tokenizers._vqkd_file import VqkdSettings, load_vqkd
from mimkit.tokenizers._vqkd_model import code_colours
from mimkit.tokenizers._words import computing_in


@TOKENIZERS.register
class VqkdTokenizer(VisualTokenizer):
    """Frozen, always in eval mode and in fp32; views of other sizes resample its positions.

    Args:
        path: a file that the training wrote, or its run folder.

    Raises:
        UserError: the file is missing, text, a pickle, cut short, or holds something else.
    """

    vocabulary: int
    settings: VqkdSettings  # sizes, and how it was trained

    def __init__(self, *, path: str) -> None:
        super().__init__()
        self.vqkd, self.settings = load_vqkd(trained_file(path))
        self.patch = self.settings.patch_size
        self.prediction_dim = self.vocabulary = self.settings.vocabulary
        decides = self.settings.model_dump_json(exclude={"training"})
        self.fingerprint = fingerprint(decides, self.vqkd)
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def encode(self, view_BChw: Tensor) -> Tensor:
        """float32 in [0, 1] -> the code of the largest cosine, int64, row by row; target_BN."""
        self.grid(view_BChw.shape[-2], view_BChw.shape[-1])
        with computing_in("fp32", view_BChw.device):
            return self.vqkd.nearest(self.vqkd.directions(view_BChw))

    def decode(self, target_BN: Tensor, grid: Grid) -> Tensor:
        """Tokens -> image_BChw in [0, 1]: each patch in the colour of its code.

        Codes say what a patch is, not how it looks; near codes have near colours.
        """
        return draw_codes(target_BN, self.vqkd.codebook_VC, grid=grid, patch=self.patch)


def draw_codes(target_BN: Tensor, codebook_VC: Tensor, *, grid: Grid, patch: int) -> Tensor:
    """One square of a colour for each token; image_BChw."""
    colour_Byx3 = code_colours(codebook_VC)[target_BN].unflatten(1, grid)
    colour_B3yx = colour_Byx3.permute(0, 3, 1, 2)
    return colour_B3yx.repeat_interleave(patch, dim=2).repeat_interleave(patch, dim=3)
