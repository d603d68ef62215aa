"""The discrete VAE of DALL-E as a visual tokenizer: one word of V for every 8 x 8 pixels.

Trained here by `tools/train_tokenizer.py`. Source: Ramesh et al. 2021; used as in BEiT.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer
from mimkit.tokenizers._dvae_file import DvaeSettings, load_dvae
from mimkit.tokenizers._dvae_model import DOWNSAMPLING, Dvae, reconstruct

EMBEDDED = Path(__file__).parent / "weights" / "dvae-embedded.safetensors"


@TOKENIZERS.register
class DvaeTokenizer(VisualTokenizer):
    """Frozen dVAE; always in eval mode and in fp32, also under autocast and on CUDA.

    Args:
        path: a safetensors file that `tools/train_tokenizer.py` wrote, or "embedded" for the
            small one that travels with mimkit.

    Raises:
        UserError: the file is missing, text, a pickle, cut short, or holds something else.
    """

    prediction_dim: int
    vocabulary: int
    settings: DvaeSettings  # sizes, and how it was trained

    def __init__(self, *, path: str) -> None:
        super().__init__()
        self.dvae, self.settings = load_dvae(
            EMBEDDED if path == "embedded" else Path(path).expanduser()
        )
        self.prediction_dim = self.vocabulary = self.dvae.vocabulary
        self.fingerprint = fingerprint(self.dvae, self.settings)
        # 1.4 times faster on CPU; the words are the same but for ties within rounding.
        self.dvae.to(memory_format=torch.channels_last)
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "DvaeTokenizer":
        """Stays in eval mode: it is never trained by the encoder's loss."""
        super().train(False)
        return self

    def grid(self, height: int, width: int) -> Grid:
        """Rows and columns of words, an eighth of the pixels; UserError if that is not whole."""
        if min(height, width) < DOWNSAMPLING or height % DOWNSAMPLING or width % DOWNSAMPLING:
            raise UserError(
                f"tokenizer 'dvae' makes one token of {DOWNSAMPLING} x {DOWNSAMPLING} pixels, "
                f"which a token view of {height} x {width} is no multiple of; set "
                f"data.token_size to a multiple of {DOWNSAMPLING}: {DOWNSAMPLING} times the "
                "number of patches along a side"
            )
        return height // DOWNSAMPLING, width // DOWNSAMPLING

    @torch.no_grad()
    def encode(self, view_BChw: Tensor) -> Tensor:
        """float32 in [0, 1] -> the likeliest word of each patch, int64, row by row; target_BN."""
        self.grid(view_BChw.shape[-2], view_BChw.shape[-1])
        with _full_precision(view_BChw.device):
            return self.dvae.logits(view_BChw).argmax(dim=1).flatten(1)

    @torch.no_grad()
    def decode(self, target_BN: Tensor, grid: Grid) -> Tensor:
        """Words -> image_BChw in [0, 1], the mean of the decoder's density."""
        target_Byx = target_BN.view(-1, *grid)
        word_BVyx = nn.functional.one_hot(target_Byx, self.vocabulary).permute(0, 3, 1, 2)
        with _full_precision(target_BN.device):
            mean_B3hw, _ = self.dvae.pixel_parameters(word_BVyx.float())
            return reconstruct(mean_B3hw)

    def loss(self, predicted_MV: Tensor, target_M: Tensor) -> Tensor:
        """Cross-entropy in nats, in fp32, mean over the masked patches."""
        return nn.functional.cross_entropy(predicted_MV.float(), target_M)


def fingerprint(dvae: Dvae, settings: DvaeSettings) -> str:
    """sha256 over the weights and the settings that decide the words; not over the history."""
    digest = hashlib.sha256(settings.model_dump_json(exclude={"training"}).encode())
    for name, weight in sorted(dvae.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """No autocast and no TF32 (cuDNN's default for fp32 convolutions): near ties would flip."""
    cudnn = torch.backends.cudnn
    with (
        torch.autocast(device.type, enabled=False),
        cudnn.flags(
            enabled=cudnn.enabled,
            benchmark=cudnn.benchmark,
            deterministic=cudnn.deterministic,
            allow_tf32=False,
        ),
    ):
        yield
