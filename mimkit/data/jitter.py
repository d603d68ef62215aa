"""Colour jitter with Pillow's arithmetic (ImageEnhance), computed on the crop where that is equal.

Only contrast looks at the whole image: it blends with the mean grey. So what comes before a
contrast is done on the whole image and the rest on the crop; the pixels are exactly those of
jittering first and cropping then.
"""

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from mimkit.data._kernels import Kernels
from mimkit.data.decode import Pixels

JITTERS = ("brightness", "contrast", "saturation")  # torchvision's order of the factors
_RAMP = Image.frombytes("L", (256, 1), bytes(range(256)))


def jitter_crop(
    pixels: Pixels,
    jitter: Sequence[tuple[str, float]],
    box: tuple[int, int, int, int],
    *,
    flip: bool,
    kernels: Kernels | None,
) -> Pixels:
    """RGB `pixels`, jittered by (operation, factor) in the order given, cropped, then mirrored.

    Args:
        box: top, left, height, width in `pixels`, before it is mirrored.
        flip: whether it is.
        kernels: of `load_kernels`; with None Pillow gives the same pixels.
    """
    factors = dict(jitter)
    if kernels is not None and len(factors) == len(jitter) == len(JITTERS):
        top, left, height, width = box
        order = list(factors)
        crop = np.empty((height, width, 3), np.uint8)
        kernels.jitter_crop(
            np.ascontiguousarray(pixels), crop, top, left, flip,
            *(order.index(name) for name in JITTERS), *(factors[name] for name in JITTERS),
        )  # fmt: skip
        return crop
    return _with_pillow(pixels, jitter, box, flip)


def _with_pillow(
    pixels: Pixels,
    jitter: Sequence[tuple[str, float]],
    box: tuple[int, int, int, int],
    flip: bool,
) -> Pixels:
    top, left, height, width = box
    names = [name for name, _ in jitter]
    whole = names.index("contrast") if "contrast" in names else 0
    image = Image.fromarray(pixels)
    for name, factor in jitter[:whole]:
        image = _OPERATIONS[name](image, factor, 0)
    grey = _mean_grey(image) if "contrast" in names else 0
    image = image.crop((left, top, left + width, top + height))
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for name, factor in jitter[whole:]:
        image = _OPERATIONS[name](image, factor, grey)
    return np.array(image)


def _brightness(image: Image.Image, factor: float, grey: int) -> Image.Image:
    return image.point(_blend_table(0, factor) * 3)


def _contrast(image: Image.Image, factor: float, grey: int) -> Image.Image:
    return image.point(_blend_table(grey, factor) * 3)


def _saturation(image: Image.Image, factor: float, grey: int) -> Image.Image:
    return Image.blend(image.convert("L").convert("RGB"), image, factor)


_OPERATIONS: dict[str, Callable[[Image.Image, float, int], Image.Image]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
}


def _blend_table(grey: int, factor: float) -> list[int]:
    """What blending with a constant `grey` makes of 0..255, by Pillow itself."""
    return list(Image.blend(Image.new("L", _RAMP.size, grey), _RAMP, factor).tobytes())


def _mean_grey(image: Image.Image) -> int:
    """Mean of the grey image, rounded as ImageEnhance.Contrast does."""
    counts = np.array(image.convert("L").histogram(), np.int64)
    return int((counts * np.arange(256)).sum() / counts.sum() + 0.5)
