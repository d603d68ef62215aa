"""The prediction picture shows what it says: tiles are compared with what was decoded."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mimkit.batch import Batch, to_unit
from mimkit.tokenizers import TOKENIZERS
from mimkit.train.pictures import COLUMNS, prediction_picture


def _tile(picture: Image.Image, row: int, column: int, size: int = 128) -> np.ndarray:
    left, top = column * (size + 4), 14 + row * (size + 4)
    return np.asarray(picture.crop((left, top, left + size, top + size)))[::4, ::4]


def test_columns_are_input_masked_decoded_and_predicted(tokenizer_file: Path) -> None:
    tokenizer = TOKENIZERS["dvae"](path=str(tokenizer_file))
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mask_BN = torch.zeros(2, 16, dtype=torch.bool)
    mask_BN[:, 5] = True  # row 1, column 1 of 4 x 4
    batch = Batch(images, images, mask_BN, torch.zeros(2), torch.zeros(2))
    target_BN = tokenizer.encode(to_unit(images))
    other = (target_BN[:, 5] + 1) % tokenizer.prediction_dim
    predicted_MV = torch.nn.functional.one_hot(other, tokenizer.prediction_dim).float()
    picture = prediction_picture(predicted_MV, tokenizer, batch, grid=(4, 4))
    assert picture.size == ((128 + 4) * len(COLUMNS), (128 + 4) * 2 + 14)
    expected = images.permute(0, 2, 3, 1).numpy()
    changed = target_BN.clone()
    changed[:, 5] = other
    redrawn = (tokenizer.decode(changed, (4, 4)) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    for row in range(2):
        assert (_tile(picture, row, 0) == expected[row]).all()
        masked = _tile(picture, row, 1)
        assert (masked[8:16, 8:16] == 128).all()
        assert (masked[:8] == expected[row][:8]).all()
        assert (_tile(picture, row, 3) == redrawn[row]).all()


def test_predicted_numbers_are_drawn_themselves() -> None:
    """Where targets are no tokens there is nothing to choose the likeliest of."""
    tokenizer = TOKENIZERS["pixels"](patch=8, normalise="none")
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mask_BN = torch.zeros(2, 16, dtype=torch.bool)
    mask_BN[:, [5, 10]] = True
    batch = Batch(images, images, mask_BN, torch.zeros(2), torch.zeros(2))
    predicted_MV = torch.tensor([0.0, 1.0, 0.2, 0.4])[:, None].expand(4, 192)
    picture = prediction_picture(predicted_MV, tokenizer, batch, grid=(4, 4))
    for row, (first, second) in enumerate(((0, 255), (51, 102))):
        expected = images[row].permute(1, 2, 0).numpy().copy()
        assert (_tile(picture, row, 2) == expected).all()
        expected[8:16, 8:16], expected[16:24, 16:24] = first, second
        assert (_tile(picture, row, 3) == expected).all()
