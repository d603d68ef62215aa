"""What every step of a bench is given: BEiT's model and recipe, images, masks and tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mimkit.batch import NO_LABEL, Batch, normalise
from mimkit.masks.blockwise import Blockwise
from mimkit.models.encoder import Encoder
from mimkit.models.init import initialise
from mimkit.models.mim import MaskedImageModel
from mimkit.models.sizes import SIZES
from mimkit.models.stems import STEMS
from mimkit.random import Purpose, generator
from mimkit.tokenizers import VisualTokenizer

GRID, NUM_MASKED, VOCABULARY, PATCH = (14, 14), 75, 8192, 16
DROP_PATH, CLIP, LR, WEIGHT_DECAY, BETAS, EPS = 0.1, 3.0, 1.5e-4, 0.05, (0.9, 0.98), 1e-8
HALF = (0.5, 0.5, 0.5)


class GivenTokens(VisualTokenizer):
    """DALL-E's vocabulary where tokens come out of a bank: only its loss is asked for."""

    prediction_dim = vocabulary = VOCABULARY

    def encode(self, view_BChw: Tensor) -> Tensor:
        raise AssertionError("tokens are given")


@dataclass(frozen=True)
class Workload:
    """One micro-batch, over and over; what is on disk or in workers is no part of a step."""

    batch: Batch
    image_BCHW: Tensor  # normalised, as BEiT's workers give it
    mask_BN: Tensor
    token_BN: Tensor
    device: torch.device

    @property
    def size(self) -> int:
        return len(self.batch.mask_BN)

    def first(self, number: int) -> "Workload":
        """A copy of the first `number` images of it."""
        batch = Batch(*(field[:number].clone() for field in self.batch))
        image_BCHW, token_BN = self.image_BCHW[:number].clone(), self.token_BN[:number].clone()
        return Workload(batch, image_BCHW, batch.mask_BN, token_BN, self.device)


def make_workload(size: int, *, device: torch.device, seed: int = 0) -> Workload:
    """Noise as images; masks are BEiT's blocks, exactly 75 of 14 x 14 patches."""
    draw = torch.Generator().manual_seed(seed)
    side = GRID[0] * PATCH
    image_u8 = torch.randint(0, 256, (size, 3, side, side), generator=draw, dtype=torch.uint8)
    token_BN = torch.randint(VOCABULARY, (size, GRID[0] * GRID[1]), generator=draw)
    mask, rng = Blockwise(grid=GRID, num_masked=NUM_MASKED), generator(Purpose.MASK, seed=seed)
    batch = Batch(
        patch_view_BCHW=image_u8,
        token_view_BChw=torch.empty(size, 3, 0, 0, dtype=torch.uint8),
        mask_BN=torch.from_numpy(np.stack([mask(rng) for _ in range(size)])),
        label_B=torch.full((size,), NO_LABEL),
        index_B=torch.arange(size),
        token_BN=token_BN.int(),
    ).to(device)
    image_BCHW = normalise(batch.patch_view_BCHW, mean=HALF, std=HALF)
    return Workload(batch, image_BCHW, batch.mask_BN, token_BN.to(device), device)


def make_model(
    size: str, *, stem: str = "linear", checkpointing: bool = False, device: str = "cpu"
) -> MaskedImageModel:
    """BEiT's pretraining model of this size, weights drawn from seed 0; on "meta" there are none.

    Relative bias shared by all blocks, LayerScale from 0.1, no absolute positions, as
    run_beit_pretraining.py is told in BEiT's README.
    """
    width, heads, depth = SIZES[size]
    with torch.device(device):
        model = MaskedImageModel(
            stem=STEMS[stem](width=width, patch_size=PATCH),
            encoder=Encoder(
                width=width, heads=heads, depth=depth, grid=GRID, positions="relative_shared",
                activation_checkpointing=checkpointing,
            ),
            prediction_dim=VOCABULARY,
        )  # fmt: skip
    if device != "meta":
        initialise(model, seed=0)
    return model
