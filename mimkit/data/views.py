"""One image -> the encoder's view and the tokenizer's view, uint8.

The transform is BEiT's (microsoft/unilm, beit/datasets.py and beit/transforms.py): colour jitter
of the whole image, horizontal flip, one random-resized crop rendered at two sizes.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mimkit.batch import Views
from mimkit.data._kernels import Kernels, load_kernels
from mimkit.data.decode import MAX_PIXELS, Exif, Pixels, decode_image
from mimkit.data.jitter import JITTERS, jitter_crop
from mimkit.data.resize import Interpolation, Size, resize, sides
from mimkit.random import Rng

Box = tuple[int, int, int, int]  # top, left, height, width


class ViewMaker(Protocol):
    """What the loaders call in a worker."""

    def __call__(self, encoded: bytes, rng: Rng) -> Views: ...


@dataclass(frozen=True)
class Drawing:
    """Everything that was drawn for one pair of views; the box lies in the flipped image."""

    jitter: tuple[tuple[str, float], ...]  # (operation, factor), in the order of application
    flip: bool
    box: Box


@dataclass(frozen=True, kw_only=True)
class TwoViews:
    """BEiT's pretraining transform.

    Args:
        image_size: side of the encoder's view, pixels, or its height and width; None leaves it
            empty (3 x 0 x 0).
        token_size: side of the tokenizer's view, pixels; None leaves it empty.
        jitter: brightness, contrast and saturation factors are uniform in 1 - jitter .. 1 + jitter.
        crop_scale: area of the crop as a share of the image's.
        crop_ratio: width / height of the crop; log-uniform.
        flip: probability of a horizontal flip.
        exif: see `decode_image`.
    """

    image_size: Size | None
    token_size: int | None
    jitter: float = 0.4
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    image_interpolation: Interpolation = "bicubic"
    token_interpolation: Interpolation = "lanczos"
    exif: Exif = "ignore"
    max_pixels: int = MAX_PIXELS

    def __call__(self, encoded: bytes, rng: Rng) -> Views:
        """Raises DecodeError."""
        pixels = decode_image(encoded, max_pixels=self.max_pixels, exif=self.exif)
        drawing = self.draw(pixels.shape[0], pixels.shape[1], rng)
        return self.render(pixels, drawing, load_kernels())

    def draw(self, height: int, width: int, rng: Rng) -> Drawing:
        """Draws in this order: order of the jitters, their three factors, flip, box."""
        order = rng.permutation(len(JITTERS)).tolist()
        *shares, flip = rng.random(len(JITTERS) + 1).tolist()
        low, high = max(0.0, 1 - self.jitter), 1 + self.jitter
        jitter = tuple((JITTERS[i], _between(low, high, shares[i])) for i in order)
        box = self._draw_box(height, width, rng)
        return Drawing(jitter if self.jitter else (), flip < self.flip, box)

    def _draw_box(self, height: int, width: int, rng: Rng) -> Box:
        """torchvision's RandomResizedCrop.get_params: ten tries, then the largest central crop."""
        narrow, wide = (math.log(ratio) for ratio in self.crop_ratio)
        for _ in range(10):
            size, shape = rng.random(2).tolist()
            area = height * width * _between(*self.crop_scale, size)
            ratio = math.exp(_between(narrow, wide, shape))
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                top, left = rng.integers(height - h + 1), rng.integers(width - w + 1)
                return int(top), int(left), h, w
        ratio = min(max(width / height, self.crop_ratio[0]), self.crop_ratio[1])
        h, w = min(height, round(width / ratio)), min(width, round(height * ratio))
        h, w = max(h, 1), max(w, 1)
        return (height - h) // 2, (width - w) // 2, h, w

    def render(self, pixels: Pixels, drawing: Drawing, kernels: Kernels | None) -> Views:
        """The views that `drawing` describes of RGB `pixels`; the same with and without kernels."""
        return self.resize(self.crop(pixels, drawing, kernels), kernels)

    def crop(self, pixels: Pixels, drawing: Drawing, kernels: Kernels | None) -> Pixels:
        """Jittered, flipped and cropped, at full resolution."""
        top, left, height, width = drawing.box
        if drawing.flip:  # cropping first is the same and moves fewer pixels
            left = pixels.shape[1] - left - width
        box = (top, left, height, width)
        return jitter_crop(pixels, drawing.jitter, box, flip=drawing.flip, kernels=kernels)

    def resize(self, crop: Pixels, kernels: Kernels | None) -> Views:
        """Both views of one crop."""
        return Views(
            _render(crop, self.image_size, self.image_interpolation, kernels),
            _render(crop, self.token_size, self.token_interpolation, kernels),
        )


def _between(low: float, high: float, share: float) -> float:
    """numpy's arithmetic of `rng.uniform(low, high)`, where `share` is its `rng.random()`."""
    return low + (high - low) * share


@dataclass(frozen=True, kw_only=True)
class CenterView:
    """The view for evaluation: the largest central square, resized; nothing is drawn.

    Both views show the same square, as both views of `TwoViews` show the same box. A view without a
    size is empty (3 x 0 x 0).

    Args:
        image_size: side in pixels; or height and width, and the largest central box of that shape.
        crop: how much of that box's sides is shown; timm's crop_pct.
    """

    image_size: Size | None
    token_size: int | None = None
    crop: float = 1.0
    image_interpolation: Interpolation = "bicubic"
    token_interpolation: Interpolation = "lanczos"
    exif: Exif = "ignore"
    max_pixels: int = MAX_PIXELS

    def __call__(self, encoded: bytes, rng: Rng | None = None) -> Views:
        """Raises DecodeError."""
        pixels = decode_image(encoded, max_pixels=self.max_pixels, exif=self.exif)
        height, width = self._box(*pixels.shape[:2])
        top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
        square = pixels[top : top + height, left : left + width]
        return Views(
            _render(square, self.image_size, self.image_interpolation, None),
            _render(square, self.token_size, self.token_interpolation, None),
        )

    def _box(self, height: int, width: int) -> tuple[int, int]:
        """Of what is shown of an image of this size."""
        rows, columns = sides(self.image_size or 1)
        scale = self.crop * min(height / rows, width / columns)
        return max(1, round(scale * rows)), max(1, round(scale * columns))


def _render(
    pixels: Pixels, size: Size | None, interpolation: Interpolation, kernels: Kernels | None
) -> Tensor:
    if size is None:
        return torch.empty((3, 0, 0), dtype=torch.uint8)
    return resize(pixels, size, interpolation, kernels)
