"""What an encoder takes, checked by shape and type, for messages that torch's own are not."""

import math

import torch
from torch import Tensor

from mimkit.errors import UserError

_OVER = 0.25  # beyond [0, 1], for check_range


def check_images(image_BCHW: Tensor, *, patch: int, dtype: torch.dtype) -> None:
    """UserError unless it is a batch of normalised images for weights of this type; reads none.

    Args:
        patch: pixels along a side, which the sides of images are multiples of.
        dtype: of the encoder's weights.
    """
    check_channels(image_BCHW)
    if image_BCHW.ndim != 4:
        raise UserError(
            f"images have the shape {tuple(image_BCHW.shape)}, expected (B, 3, height, width); one "
            "image is a batch of one: images[None]"
        )
    height, width = image_BCHW.shape[-2:]
    if not len(image_BCHW) or not height or not width:
        raise UserError(
            f"images have the shape {tuple(image_BCHW.shape)}, which is none; give at least one"
        )
    check_sides(height, width, patch=patch, what="images are of")
    _check_type(image_BCHW, dtype)


def check_channels(image_CHW: Tensor) -> None:
    """UserError unless it is a tensor of one image or a batch, three channels before the sides."""
    if not isinstance(image_CHW, Tensor):
        raise UserError(
            f"images are a {type(image_CHW).__name__}, expected a tensor (B, 3, height, width); "
            "torchvision.transforms.functional.pil_to_tensor and torch.from_numpy make tensors"
        )
    shape = tuple(image_CHW.shape)
    if len(shape) not in (3, 4):
        raise UserError(f"images have the shape {shape}, expected (B, 3, height, width)")
    if shape[-3] == 3:
        return
    remedy = "give red, green and blue"
    if shape[-1] == 3:
        order = "2, 0, 1" if len(shape) == 3 else "0, 3, 1, 2"
        remedy = f"channels are last: images.permute({order})"
    elif shape[-3] == 1:
        remedy = "grey images have three equal ones: torch.cat([images] * 3, -3)"
    elif shape[-3] == 4:
        remedy = "a fourth, alpha, is left out by images[..., :3, :, :]"
    raise UserError(
        f"images have the shape {shape}, so {shape[-3]} channels where 3 are expected, as in "
        f"(B, 3, height, width); {remedy}"
    )


def check_range(image_CHW: Tensor) -> None:
    """UserError unless it is floats in [0, 1]; a quarter more is taken, as bicubic resizing gives.

    It is one pass over pixels that are read anyway, not over an encoder's.
    """
    if not image_CHW.is_floating_point():
        raise UserError(
            f"images are {image_CHW.dtype}, expected uint8 in 0..255 (images.to(torch.uint8)) or "
            "floats in [0, 1]"
        )
    if not image_CHW.numel():
        return
    least, most = (float(value) for value in image_CHW.aminmax())
    if least >= -_OVER and most <= 1 + _OVER:
        return
    if math.isnan(least):
        raise UserError("images hold NaN; look at how they were read or resized")
    bytes_like = least >= -_OVER and most <= 255 + _OVER
    raise UserError(
        f"images have values from {least:.4g} to {most:.4g}, and floats are expected in [0, 1]; "
        + ("divide them by 255, or give uint8" if bytes_like else "are they normalised already?")
    )


def check_sides(height: int, width: int, *, patch: int, what: str) -> None:
    """UserError unless there are whole patches; `what` is of that size, for the message."""
    if min(height, width) >= patch and height % patch == 0 and width % patch == 0:
        return
    nearest = "x".join(str(max(1, round(side / patch)) * patch) for side in (height, width))
    raise UserError(
        f"{what} {height}x{width} pixels, which do not divide into patches of {patch}; give "
        f"multiples of {patch}, for example {nearest}"
    )


def _check_type(image_BCHW: Tensor, dtype: torch.dtype) -> None:
    if not image_BCHW.is_floating_point():
        raise UserError(
            f"images are {image_BCHW.dtype}, expected normalised ones of {dtype}; "
            "encoder.normalisation(images) makes them of uint8"
        )
    if image_BCHW.dtype != dtype and not torch.is_autocast_enabled(image_BCHW.device.type):
        raise UserError(
            f"images are {image_BCHW.dtype} and the encoder's weights {dtype}; give "
            f"images.to({dtype}), or cast the encoder: encoder.to({image_BCHW.dtype})"
        )
