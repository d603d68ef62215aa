"""What every image of a set is: read once, its header looked at, and decoded as in training."""

import hashlib
import io
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mimkit.audit._shard_samples import Samples
from mimkit.data.decode import MAX_PIXELS, DecodeError, Pixels, decode_image, image_format
from mimkit.data.order import Order
from mimkit.errors import UserError

SMALLEST_SIDE = 8  # pixels; the smallest view that a configuration takes
_DIGEST = 16  # bytes of SHA-256: 2^64 images before two different ones are likely to agree
_ORIENTATION = 0x0112
_PILLOW_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
# What Pillow raises for bad headers and bad EXIF.
_PILLOW_ERRORS = (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error, zlib.error)
_HOLDS_EXIF = {"exif", "xmp", "XML:com.adobe.xmp"}


class Header(NamedTuple):
    """What an image says of itself before its pixels."""

    mode: str  # Pillow's
    width: int  # pixels
    height: int
    orientation: int  # EXIF's, 1..8


class Look(NamedTuple):
    """What one image showed.

    Attributes:
        of_bytes: hash of the encoded image; b"" where it could not be read.
        of_pixels: hash of its RGB pixels and their size; b"" where it was not decoded.
        format: "jpg", "png" or "webp", by content; "" where it is none of them.
        header: None where it cannot be read.
        is_constant: all pixels are the same; False where it was not decoded.
        trouble: kind and detail of what makes it unfit, if anything does.
    """

    of_bytes: bytes = b""
    of_pixels: bytes = b""
    format: str = ""
    header: Header | None = None
    is_constant: bool = False
    trouble: tuple[str, str] | None = None


def choose(samples: Samples, *, most: int | None, seed: int) -> NDArray[np.bool_]:
    """Which images are decoded: all, or `most` of them, drawn by `seed`."""
    chosen = np.zeros(len(samples), np.bool_)
    if most is None or most >= len(samples):
        return ~chosen
    order = Order(groups=np.array([0, len(samples)]), seed=seed, window=1)
    chosen[order.epoch_order(0)[:most]] = True
    return chosen


def look_at(
    samples: Samples, decoded: NDArray[np.bool_], *, done: Callable[[], object] = lambda: None
) -> list[Look]:
    """Reads all images and decodes those chosen; `done` is called after each."""
    looks = []
    for number in range(len(samples)):
        try:
            looks.append(_look(samples.read(number), decode=bool(decoded[number])))
        except (OSError, UserError) as error:
            cause = getattr(error, "strerror", None) or str(error)
            looks.append(Look(trouble=("unreadable", cause)))
        done()
    return looks


def _look(encoded: bytes, *, decode: bool) -> Look:
    """Raises nothing for what is wrong with the image."""
    of_bytes = hashlib.sha256(encoded).digest()[:_DIGEST]
    kind, header = "", None
    try:
        kind = image_format(encoded)
        header = _read_header(encoded, kind)
        if header is not None and (size := _bad_size(header)):
            return Look(of_bytes, format=kind, header=header, trouble=("image_size", size))
        if not decode:
            if header is None:
                raise DecodeError("its header cannot be read")
            return Look(of_bytes, format=kind, header=header)
        pixels = decode_image(encoded)
    except Image.DecompressionBombError as error:
        return Look(of_bytes, format=kind, trouble=("image_size", str(error)))
    except DecodeError as error:
        return Look(of_bytes, format=kind, header=header, trouble=("undecodable", str(error)))
    header = header or Header("RGB", pixels.shape[1], pixels.shape[0], 1)
    return Look(of_bytes, _digest(pixels), kind, header, _is_constant(pixels))


def _read_header(encoded: bytes, kind: str) -> Header | None:
    """None where Pillow cannot. Raises its DecompressionBombError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(encoded), formats=[_PILLOW_FORMATS[kind]])
        except _PILLOW_ERRORS:
            return None
        is_small = image.width * image.height <= MAX_PIXELS
        orientation = _orientation(image) if is_small else 1
        return Header(image.mode, image.width, image.height, orientation)


def _orientation(image: Image.Image) -> int:
    if image.format == "PNG" and _HOLDS_EXIF.isdisjoint(image.info):
        return 1  # Pillow would decode the image to find that out
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except _PILLOW_ERRORS:
        return 1
    return int(value) if value in range(1, 9) else 1


def _bad_size(header: Header) -> str:
    """What is wrong with it; "" if nothing is."""
    size = f"{header.width} x {header.height} pixels"
    if header.width * header.height > MAX_PIXELS:
        return f"{size}; at most {MAX_PIXELS:,} in all are decoded"
    if min(header.width, header.height) < SMALLEST_SIDE:
        return f"{size}; no side should be shorter than {SMALLEST_SIDE}"
    return ""


def _digest(pixels: Pixels) -> bytes:
    digest = hashlib.sha256(np.array(pixels.shape, "<i8").tobytes())
    digest.update(pixels.data)
    return digest.digest()[:_DIGEST]


def _is_constant(pixels: Pixels) -> bool:
    """The middle row first: it is enough for nearly every photograph."""
    first = pixels[0, 0]
    return bool((pixels[len(pixels) // 2] == first).all() and (pixels == first).all())
