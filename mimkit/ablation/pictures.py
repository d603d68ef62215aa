"""Pictures of a report: masks as drawn, first-layer filters, and what each arm redraws."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from safetensors import safe_open
from torch import Tensor

from mimkit import build
from mimkit.ablation.plan import Plan
from mimkit.random import Purpose, generator
from mimkit.train import checkpoint
from mimkit.train.pictures import COLUMNS, picture_grid

_MASKS, _FILTERS, _ROWS = 8, 24, 4
_MARGIN, _HEADER = 4, 14


def mask_picture(plan: Plan) -> Image.Image:
    """The masks of the first samples of training, as all arms get them: black is masked."""
    config = plan.arms[plan.study.reference]
    stem = build.build_stem(config)
    grid = stem.grid(config.data.image_size, config.data.image_size)
    mask = build.build_mask(config, grid)
    rows = [mask(generator(Purpose.MASK, seed=config.seed, sample=sample))
            for sample in range(_MASKS)]  # fmt: skip
    tiles = [np.where(one.reshape(grid), 0, 235).astype(np.uint8) for one in rows]
    return _row([Image.fromarray(tile).resize((72, 72), 0) for tile in tiles])


def filter_picture(plan: Plan) -> Image.Image | None:
    """First-layer filters of each arm's first seed, the strongest first; None where no run is."""
    rows = []
    for arm in plan.arms:
        filters = _first_filters(plan.of(arm)[0].folder)
        if filters is not None:
            rows.append((arm, _filter_row(filters)))
    return _captioned(rows) if rows else None


def _first_filters(folder: Path) -> Tensor | None:
    """(D, 3, k, k) of the stem's first convolution."""
    newest = checkpoint.latest(folder / "checkpoints")
    if newest is None:
        return None
    with safe_open(newest / "model.safetensors", framework="pt") as weights:
        names = weights.keys()
        for name in sorted(names):
            if name.startswith("stem.") and weights.get_slice(name).get_shape()[1:2] == [3]:
                found: Tensor = weights.get_tensor(name)
                return found
    return None


def _filter_row(filter_D3kk: Tensor) -> Image.Image:
    strongest = filter_D3kk.flatten(1).norm(dim=1).argsort(descending=True)[:_FILTERS]
    return _row([_filter_tile(filter_D3kk[number]) for number in strongest])


def _filter_tile(filter_3kk: Tensor) -> Image.Image:
    """Grey is zero; each filter in its own contrast."""
    scaled = 0.5 + 0.5 * filter_3kk / filter_3kk.abs().max().clamp_min(1e-12)
    pixels = (scaled * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(pixels)).resize((28, 28), 0)


def reconstruction_picture(plan: Plan) -> Image.Image | None:
    """Input, masked input and decoded targets of held-out images, then what each arm predicts.

    Put together from the last picture in each run folder of the first seed, which shows the same
    images in all. None where there are no pictures.
    """
    found = [(arm, picture) for arm in plan.arms
             for picture in _last_picture(plan.of(arm)[0].folder)]  # fmt: skip
    if not found:
        return None
    columns = [_column(found[0][1], number) for number in range(len(COLUMNS) - 1)]
    columns += [_column(picture, len(COLUMNS) - 1) for _, picture in found]
    rows = min(_ROWS, *(len(column) for column in columns))
    titles = (*COLUMNS[:-1], *(arm for arm, _ in found))
    return picture_grid([column[:rows] for column in columns], titles)


def _last_picture(folder: Path) -> Iterator[Image.Image]:
    pictures = sorted((folder / "pictures").glob("step-*.png"))
    if pictures:
        with Image.open(pictures[-1]) as opened:
            yield opened.convert("RGB")


def _column(picture: Image.Image, number: int) -> Tensor:
    """(rows, 3, side, side) of one column of `picture_grid`, whose tiles are square."""
    side = picture.width // len(COLUMNS) - _MARGIN
    left = number * (side + _MARGIN)
    tiles = [picture.crop((left, top, left + side, top + side))
             for top in range(_HEADER, picture.height - side + 1, side + _MARGIN)]  # fmt: skip
    pixels: NDArray[np.uint8] = np.stack([np.asarray(tile) for tile in tiles])
    return torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float() / 255


def _row(tiles: list[Image.Image]) -> Image.Image:
    width, height = tiles[0].size
    canvas = Image.new("RGB", ((width + _MARGIN) * len(tiles), height), "white")
    for number, tile in enumerate(tiles):
        canvas.paste(tile, (number * (width + _MARGIN), 0))
    return canvas


def _captioned(rows: list[tuple[str, Image.Image]]) -> Image.Image:
    height = max(row.height for _, row in rows) + _MARGIN
    left = 8 + 6 * max(len(name) for name, _ in rows)
    canvas = Image.new("RGB", (left + max(r.width for _, r in rows), height * len(rows)), "white")
    draw: Any = ImageDraw.Draw(canvas)
    for number, (name, row) in enumerate(rows):
        draw.text((2, number * height + 8), name, fill="black")
        canvas.paste(row, (left, number * height))
    return canvas
