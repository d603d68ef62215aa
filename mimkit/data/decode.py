"""Encoded bytes -> RGB pixels, strictly: a damaged image is an error and never grey mush.

JPEG goes through simplejpeg, which reports what Pillow and OpenCV decode in silence: a cut, and
most wrong bytes in mid-scan (JPEG has no checksums: of 100 ImageNet files with 200 random bytes
in them 95 were refused, with 4 kB all; what proves a shard sound is the SHA-256 in its manifest).
PNG goes through Pillow after its checksums were compared, WebP through Pillow.
"""

import io
import struct
import warnings
import zlib
from typing import Literal

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from mimkit.errors import UserError

Pixels = NDArray[np.uint8]  # height, width, RGB
Exif = Literal["ignore", "honour"]
MAX_PIXELS = 89_478_485  # Pillow's limit: 256 MB as RGB
_ORIENTATION = 0x0112
_MAGIC = {
    b"\xff\xd8": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"RIFF": "webp",
    b"GIF8": "a GIF",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
    b"BM": "a BMP",
    b"<": "text (HTML?)",
}
_PILLOW_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
_PILLOW_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,  # what its PNG reader raises
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class DecodeError(UserError):
    """The bytes are no whole image that we read; the message is the cause."""


def image_format(encoded: bytes) -> str:
    """ "jpg", "png" or "webp", by content: names lie (ImageNet has a PNG called .JPEG).

    Raises:
        DecodeError: anything else.
    """
    if not encoded:
        raise DecodeError("empty, 0 bytes")
    kind = next((name for magic, name in _MAGIC.items() if encoded.startswith(magic)), "unknown")
    if kind == "webp" and encoded[8:12] != b"WEBP":
        kind = "unknown"
    if kind not in _PILLOW_FORMATS:
        found = f"begins with {encoded[:8]!r}" if kind == "unknown" else f"is {kind}"
        raise DecodeError(f"{found}; only JPEG, PNG and WebP are read")
    return kind


def decode_image(encoded: bytes, *, max_pixels: int = MAX_PIXELS, exif: Exif = "ignore") -> Pixels:
    """RGB pixels, uint8, height x width x 3, contiguous.

    Grey and palette images become RGB; 16-bit grey is scaled to 8; CMYK is converted as Pillow
    does; transparency is composited on white; of an animation the first frame is taken.

    Args:
        max_pixels: larger images are refused before they are decoded.
        exif: "ignore" takes the pixels as they are stored, as BEiT does; "honour" turns them.

    Raises:
        DecodeError: damaged, cut, too large, or not a format that we read.
    """
    kind = image_format(encoded)
    pixels = _decode_jpeg(encoded, max_pixels) if kind == "jpg" else None
    if pixels is None:
        pixels = _decode_with_pillow(encoded, kind, max_pixels)
    if exif == "honour":
        pixels = _turn(pixels, _orientation(encoded, kind))
    return pixels


def _decode_jpeg(encoded: bytes, max_pixels: int) -> Pixels | None:
    """None for CMYK: sound, but Pillow's conversion to RGB is the one that people expect."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
        _check_size(int(height), int(width), max_pixels)
        pixels: Pixels = simplejpeg.decode_jpeg(encoded, "RGB")
    except DecodeError:
        raise
    except (ValueError, MemoryError) as error:
        raise DecodeError(str(error) or "too large for the memory") from error
    return None if colours in ("CMYK", "YCCK") else pixels


def _decode_with_pillow(encoded: bytes, kind: str, max_pixels: int) -> Pixels:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metadata and size; what matters is checked here
        try:
            if kind == "webp" and int.from_bytes(encoded[4:8], "little") + 8 > len(encoded):
                raise DecodeError("cut short")
            if kind == "png":
                _open(encoded, kind, max_pixels).verify()  # the checksums; closes the image
            return _rgb(_open(encoded, kind, max_pixels))
        except DecodeError:
            raise
        except UnidentifiedImageError as error:  # its own text has an address in memory
            raise DecodeError(f"no {_PILLOW_FORMATS[kind]} that Pillow can read") from error
        except _PILLOW_ERRORS as error:
            raise DecodeError(str(error) or type(error).__name__) from error


def _open(encoded: bytes, kind: str, max_pixels: int) -> Image.Image:
    image: Image.Image = Image.open(io.BytesIO(encoded), formats=[_PILLOW_FORMATS[kind]])
    _check_size(image.height, image.width, max_pixels)
    return image


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise DecodeError(
            f"{width} x {height} = {height * width} pixels, more than max_pixels = {max_pixels}"
        )


def _rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I"):  # 16 bit grey; Pillow's own conversion clips at 255
        grey = np.asarray(image).astype(np.int64)
        scaled = ((grey * 255 + 32767) // 65535).astype(np.uint8)
        return np.repeat(scaled[..., None], 3, axis=2)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return np.array(image.convert("RGB"))


def _orientation(encoded: bytes, kind: str) -> int:
    """EXIF orientation, 1..8; 1 where there is none or where the EXIF data are damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(encoded), formats=[_PILLOW_FORMATS[kind]])
            value = image.getexif().get(_ORIENTATION, 1)
        except _PILLOW_ERRORS:
            return 1
    return value if value in range(1, 9) else 1


def _turn(pixels: Pixels, orientation: int) -> Pixels:
    """EXIF 2.3, tag 274: orientations above 4 are transposed; then rows, columns are reversed."""
    if orientation > 4:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    turned: Pixels = pixels.copy()  # torch takes no negative strides
    return turned
