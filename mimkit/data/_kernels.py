"""Compiled loops over pixels, where numba is installed: `pip install 'mimkit[fast]'`.

They give exactly what Pillow and numpy give, in a fraction of the time. Two things make LLVM
vectorise them: a row is indexed flat (`row[3 * x]`, a constant stride), and float32 stays float32.
"""

# What stands inside a kernel is typed by numba.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mimkit.data.decode import Pixels

# ITU-R 601-2 luma with Pillow's integers; in float32 all sums of these are exact, being < 2**24.
_RED, _GREEN, _BLUE = (np.float32(weight / 65536) for weight in (19595, 38470, 7471))
_HALF = np.float32(0.5)
_BLACK, _WHITE = np.float32(0), np.float32(255)
_1, _2, _3 = np.uintp(1), np.uintp(2), np.uintp(3)
# No contraction (a + b * c in one rounding) and no reassociation: each would change pixels.
_FAST = {"nnan", "ninf", "nsz"}


@dataclass(frozen=True)
class Kernels:
    """Compiled `_jitter_crop` and `_split_planes`; they run in the thread that calls them."""

    jitter_crop: Callable[..., None]
    split_planes: Callable[..., None]


@cache
def load_kernels() -> Kernels | None:
    """Compiles them, or reads them from numba's cache on disk; None without numba.

    Takes seconds the first time on a machine, 0.3 s later: call it before processes are forked.
    """
    try:
        import numba
    except ImportError as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
            warnings.warn(
                f"numba is installed but cannot be imported ({error}); images are transformed "
                "without it, the same but slower. Mend it, or: pip uninstall numba",
                stacklevel=2,
            )
        return None
    # Read-only is the wider type: it also takes arrays that can be written to.
    pixels = numba.types.Array(numba.uint8, 3, "C", readonly=True)
    out = numba.types.Array(numba.uint8, 3, "C")
    place, factor = numba.int64, numba.float32
    jitter_types = (pixels, out, place, place, numba.boolean, *(place,) * 3, *(factor,) * 3)
    return Kernels(
        jitter_crop=_compile(numba.njit, _jitter_crop, jitter_types),
        split_planes=_compile(numba.njit, _split_planes, (pixels, out)),
    )


def _compile(
    njit: Callable[..., Any], function: Callable[..., None], types: tuple[Any, ...]
) -> Callable[..., None]:
    """Compiled code is kept beside this file, else in the user's cache, else it is made again."""
    try:
        compiled: Callable[..., None] = njit(types, cache=True, fastmath=_FAST)(function)
    except (RuntimeError, OSError):  # numba finds no folder to write to; or the disk is full
        compiled = njit(types, fastmath=_FAST)(function)
    return compiled


def _jitter_crop(
    pixels: Pixels,
    crop: Pixels,
    top: int,
    left: int,
    flip: bool,
    brightness_at: int,
    contrast_at: int,
    saturation_at: int,
    brightness: float,
    contrast: float,
    saturation: float,
) -> None:
    """Fills `crop` from `pixels` at `top`, `left`: jittered, then mirrored if `flip`.

    The small functions stand inside: numba inlines them there, and could not see them outside
    without being imported when this file is.

    Args:
        brightness_at: 0, 1 or 2: which of the three operations it is; so are the next two.
        brightness: its factor; so are the next two.
    """

    def load(row, x):
        return np.float32(row[3 * x]), np.float32(row[3 * x + 1]), np.float32(row[3 * x + 2])

    def store(row, x, rgb):
        row[3 * x] = np.uint8(rgb[0])
        row[3 * x + 1] = np.uint8(rgb[1])
        row[3 * x + 2] = np.uint8(rgb[2])

    def grey(rgb):  # still to be rounded down
        return rgb[0] * _RED + rgb[1] * _GREEN + rgb[2] * _BLUE + _HALF

    def times(value, factor):
        return np.floor(min(value * factor, _WHITE))

    def mix(value, other, factor):
        return np.floor(min(max(other + factor * (value - other), _BLACK), _WHITE))

    def bright(rgb):
        return times(rgb[0], brightness), times(rgb[1], brightness), times(rgb[2], brightness)

    def blend(rgb, other, factor):
        return mix(rgb[0], other, factor), mix(rgb[1], other, factor), mix(rgb[2], other, factor)

    def saturate(rgb):
        return blend(rgb, np.floor(grey(rgb)), saturation)

    height, width = crop.shape[0], crop.shape[1]
    whole_height, whole_width = pixels.shape[0], pixels.shape[1]
    rows = pixels.reshape(whole_height, 3 * whole_width)
    crop_rows = crop.reshape(height, 3 * width)

    # Contrast blends with the mean grey of the whole image as it is when contrast's turn comes.
    total = 0
    for y in range(whole_height):
        row, in_row = rows[y], np.int32(0)
        if contrast_at == 0:
            for x in range(whole_width):
                in_row += np.int32(grey(load(row, x)))
        elif contrast_at == 1 and brightness_at == 0:
            for x in range(whole_width):
                in_row += np.int32(grey(bright(load(row, x))))
        elif contrast_at == 1:
            for x in range(whole_width):
                in_row += np.int32(grey(saturate(load(row, x))))
        elif brightness_at == 0:
            for x in range(whole_width):
                in_row += np.int32(grey(saturate(bright(load(row, x)))))
        else:
            for x in range(whole_width):
                in_row += np.int32(grey(bright(saturate(load(row, x)))))
        total += in_row
    mean = np.float32(int(total / (whole_height * whole_width) + 0.5))

    def contrasted(rgb):
        return blend(rgb, mean, contrast)

    mirrored = np.empty(3 * width, np.uint8)
    for y in range(height):
        row = rows[top + y, 3 * left : 3 * (left + width)]
        out = mirrored if flip else crop_rows[y]
        if brightness_at < contrast_at < saturation_at:
            for x in range(width):
                store(out, x, saturate(contrasted(bright(load(row, x)))))
        elif brightness_at < saturation_at < contrast_at:
            for x in range(width):
                store(out, x, contrasted(saturate(bright(load(row, x)))))
        elif contrast_at < brightness_at < saturation_at:
            for x in range(width):
                store(out, x, saturate(bright(contrasted(load(row, x)))))
        elif contrast_at < saturation_at < brightness_at:
            for x in range(width):
                store(out, x, bright(saturate(contrasted(load(row, x)))))
        elif saturation_at < brightness_at < contrast_at:
            for x in range(width):
                store(out, x, contrasted(bright(saturate(load(row, x)))))
        else:
            for x in range(width):
                store(out, x, bright(contrasted(saturate(load(row, x)))))
        if flip:
            for x in range(width):
                end = np.uintp(3 * (width - x))  # unsigned: a negative index would mean something
                crop_rows[y, 3 * x] = mirrored[end - _3]
                crop_rows[y, 3 * x + 1] = mirrored[end - _2]
                crop_rows[y, 3 * x + 2] = mirrored[end - _1]


def _split_planes(pixels: Pixels, planes: Pixels) -> None:
    """Fills `planes`, 3 x height x width, from `pixels`, height x width x 3."""
    height, width = pixels.shape[0], pixels.shape[1]
    rows = pixels.reshape(height, 3 * width)
    for y in range(height):
        row, red, green, blue = rows[y], planes[0, y], planes[1, y], planes[2, y]
        for x in range(width):
            red[x] = row[3 * x]
            green[x] = row[3 * x + 1]
            blue[x] = row[3 * x + 2]
