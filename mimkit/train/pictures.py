"""What the model sees and predicts, as a picture a person can judge."""

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from mimkit.batch import Batch, Grid, to_unit
from mimkit.tokenizers import VisualTokenizer

_MARGIN, _HEADER = 4, 14
COLUMNS = ("input", "masked input", "targets decoded", "predicted where masked")


@torch.no_grad()
def prediction_picture(
    predicted_MV: Tensor, tokenizer: VisualTokenizer, batch: Batch, *, grid: Grid
) -> Image.Image:
    """One row an image: input, masked input, decoded true targets, decoded predicted ones.

    The last column decodes the true targets where the patch was visible and the predicted ones
    where it was masked: the likeliest token, or the numbers themselves where there are no tokens.
    """
    view_BChw = to_unit(batch.token_view_BChw)
    target_BN = tokenizer.encode(view_BChw)
    mixed_BN = target_BN.clone()
    words = tokenizer.vocabulary is not None
    mixed_BN[batch.mask_BN] = predicted_MV.argmax(dim=1) if words else predicted_MV
    masked_BChw = torch.where(_pixels(batch.mask_BN, grid, view_BChw), 0.5, view_BChw)
    columns = [view_BChw, masked_BChw, tokenizer.decode(target_BN, grid),
               tokenizer.decode(mixed_BN, grid)]  # fmt: skip
    return picture_grid(columns, COLUMNS)


def _pixels(mask_BN: Tensor, grid: Grid, view_BChw: Tensor) -> Tensor:
    mask_B1rc = mask_BN.view(-1, 1, *grid).float()
    return nn.functional.interpolate(mask_B1rc, size=view_BChw.shape[2:], mode="nearest").bool()


def picture_grid(columns: list[Tensor], titles: tuple[str, ...]) -> Image.Image:
    """Columns of images (B, C, h, w in [0, 1]) side by side under their titles, at least 112 px."""
    scale = max(1, -(-112 // columns[0].shape[-1]))
    height, width = (side * scale for side in columns[0].shape[2:])
    rows = len(columns[0])
    canvas = Image.new("RGB", ((width + _MARGIN) * len(columns),
                               (height + _MARGIN) * rows + _HEADER), "white")  # fmt: skip
    draw = ImageDraw.Draw(canvas)
    for x, (column, title) in enumerate(zip(columns, titles, strict=True)):
        draw.text((x * (width + _MARGIN) + 1, 1), title, fill="black")
        for y, image in enumerate(column):
            pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
            tile = Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), 0)
            canvas.paste(tile, (x * (width + _MARGIN), _HEADER + y * (height + _MARGIN)))
    return canvas
