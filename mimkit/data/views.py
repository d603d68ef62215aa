"""One image -> the encoder's view and the tokenizer's view, uint8.

The transform is BEiT's (microsoft/unilm, beit/datasets.py and beit/transforms.py): colour jitter
of the whole image, horizontal flip, one random-resized crop rendered at two sizes.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from mimkit.batch import Views
from mimkit.data.decode import MAX_PIXELS, Exif, Pixels, decode_image
from mimkit.data.jitter import JITTERS, jitter_crop
from mimkit.data.resize import Interpolation, resize
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
        image_size: side of the encoder's view, pixels.
        token_size: side of the tokenizer's view, pixels.
        jitter: brightness, contrast and saturation factors are uniform in 1 - jitter .. 1 + jitter.
        crop_scale: area of the crop as a share of the image's.
        crop_ratio: width / height of the crop; log-uniform.
        flip: probability of a horizontal flip.
        exif: see `decode_image`.
    """

    image_size: int
    token_size: int
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
        return self.render(pixels, self.draw(pixels.shape[0], pixels.shape[1], rng))

    def draw(self, height: int, width: int, rng: Rng) -> Drawing:
        """Draws in this order: order of the jitters, their three factors, flip, box."""
        order = rng.permutation(len(JITTERS))
        low, high = max(0.0, 1 - self.jitter), 1 + self.jitter
        factors = rng.uniform(low, high, len(JITTERS))
        jitter = tuple((JITTERS[i], float(factors[i])) for i in order) if self.jitter else ()
        flip = bool(rng.random() < self.flip)
        return Drawing(jitter, flip, self._draw_box(height, width, rng))

    def _draw_box(self, height: int, width: int, rng: Rng) -> Box:
        """torchvision's RandomResizedCrop.get_params: ten tries, then the largest central crop."""
        narrow, wide = (math.log(ratio) for ratio in self.crop_ratio)
        for _ in range(10):
            area = height * width * rng.uniform(*self.crop_scale)
            ratio = math.exp(rng.uniform(narrow, wide))
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                top, left = rng.integers(height - h + 1), rng.integers(width - w + 1)
                return int(top), int(left), h, w
        ratio = min(max(width / height, self.crop_ratio[0]), self.crop_ratio[1])
        h, w = min(height, round(width / ratio)), min(width, round(height * ratio))
        h, w = max(h, 1), max(w, 1)
        return (height - h) // 2, (width - w) // 2, h, w

    def render(self, pixels: Pixels, drawing: Drawing) -> Views:
        """The views that `drawing` describes of RGB `pixels`."""
        top, left, height, width = drawing.box
        if drawing.flip:  # cropping first is the same and moves fewer pixels
            left = pixels.shape[1] - left - width
        crop = jitter_crop(pixels, drawing.jitter, (top, left, height, width))
        if drawing.flip:
            crop = crop[:, ::-1].copy()  # torch takes no negative strides
        return Views(
            resize(crop, self.image_size, self.image_interpolation),
            resize(crop, self.token_size, self.token_interpolation),
        )


@dataclass(frozen=True, kw_only=True)
class CenterView:
    """The view for evaluation: the largest central square, resized; nothing is drawn.

    Both views show the same square, as both views of `TwoViews` show the same box. Without
    `token_size` the token view is empty (3 x 0 x 0).
    """

    image_size: int
    token_size: int | None = None
    image_interpolation: Interpolation = "bicubic"
    token_interpolation: Interpolation = "lanczos"
    exif: Exif = "ignore"
    max_pixels: int = MAX_PIXELS

    def __call__(self, encoded: bytes, rng: Rng | None = None) -> Views:
        """Raises DecodeError."""
        pixels = decode_image(encoded, max_pixels=self.max_pixels, exif=self.exif)
        side = min(pixels.shape[:2])
        top, left = ((length - side) // 2 for length in pixels.shape[:2])
        square = pixels[top : top + side, left : left + side]
        token_view = torch.empty((3, 0, 0), dtype=torch.uint8)
        if self.token_size is not None:
            token_view = resize(square, self.token_size, self.token_interpolation)
        return Views(resize(square, self.image_size, self.image_interpolation), token_view)
