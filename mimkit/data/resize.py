"""Antialiased resizing of uint8 pixels, defined by torch.

Pillow 13 changed its order of passes and with it pixels by up to 20 levels; torch's uint8 kernel
equals Pillow up to 12 within 2 levels, is four times as fast, and the same on every CPU.
"""

from functools import cache
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from mimkit.data._kernels import Kernels
from mimkit.data.decode import Pixels

Interpolation = Literal["bilinear", "bicubic", "lanczos"]
Size = int | tuple[int, int]  # pixels: of a square, or height and width


def sides(size: Size) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else size


def resize(
    pixels: Pixels, size: Size, interpolation: Interpolation, kernels: Kernels | None = None
) -> Tensor:
    """RGB `pixels`, height x width x 3 -> uint8 tensor, 3 x size x size, or 3 x height x width.

    Args:
        kernels: of `load_kernels`; they only copy faster.
    """
    if interpolation == "lanczos" and not _has_lanczos():
        square = _pillow_lanczos(pixels, size)
    else:
        square = _with_torch(np.ascontiguousarray(pixels), sides(size), interpolation)
    return torch.from_numpy(_planes(square, kernels))


def _with_torch(pixels: Pixels, size: tuple[int, int], interpolation: Interpolation) -> Pixels:
    """To torch the channels lie last (hence `reshape`, which gives a batch axis of one its stride).

    Then it does not sort pixels into planes, which takes its loop half as long as the resizing. And
    numpy turns the axes: a call of torch is slow where other work has emptied the CPU's caches.
    """
    image_1CHW = torch.from_numpy(pixels.reshape(1, *pixels.shape).transpose(0, 3, 1, 2))
    view_1CHW = interpolate(image_1CHW, size, mode=interpolation, antialias=True)
    square: Pixels = view_1CHW.numpy()[0].transpose(1, 2, 0)
    return square


def _planes(square: Pixels, kernels: Kernels | None) -> Pixels:
    """Height x width x 3 -> 3 x height x width, contiguous."""
    if kernels is None:
        return np.ascontiguousarray(square.transpose(2, 0, 1))
    planes = np.empty((3, *square.shape[:2]), np.uint8)
    kernels.split_planes(np.ascontiguousarray(square), planes)
    return planes


def _pillow_lanczos(pixels: Pixels, size: Size) -> Pixels:
    """First across, then down, as Pillow did up to 12; it equals torch's within 2 levels."""
    height, width = sides(size)
    image = Image.fromarray(pixels).resize((width, len(pixels)), Image.Resampling.LANCZOS)
    return np.array(image.resize((width, height), Image.Resampling.LANCZOS))


@cache
def _has_lanczos() -> bool:
    """torch < 2.14 has no Lanczos; Pillow stands in."""
    pixel = torch.zeros(1, 3, 1, 1, dtype=torch.uint8)
    try:
        interpolate(pixel, (1, 1), mode="lanczos", antialias=True)
    except (NotImplementedError, ValueError):
        return False
    return True
