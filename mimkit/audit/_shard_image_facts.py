"""What the images of a set are like together, and which are odd."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimkit.audit._shard_findings import Finding
from mimkit.audit._shard_images import Header, Look
from mimkit.audit._shard_samples import Samples

_GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "F")  # Pillow's modes
_FORMATS = {"jpeg": "jpg"}  # by extension, where they differ


@dataclass(frozen=True)
class Spread:
    least: float
    median: float
    most: float


@dataclass(frozen=True)
class ImageFacts:
    """Attributes:
    with_header: images that could be read so far that their size is known; the rest is of them.
    bytes: of the encoded images together.
    width, height, short_side: in pixels.
    modes: number of images by Pillow's name; L is grey.
    formats: number of images by content, whatever their names say.
    """

    with_header: int
    bytes: int
    width: Spread
    height: Spread
    short_side: Spread
    megapixels: Spread
    kilobytes: Spread
    modes: dict[str, int]
    formats: dict[str, int]


def image_findings(samples: Samples, looks: list[Look], *, view: int) -> Iterator[Finding]:
    """What is wrong or odd about the images; `view`: side of the encoder's view in pixels."""
    for number, look in enumerate(looks):
        if look.trouble is not None:
            yield samples.finding(number, *look.trouble)

    def those(condition: Callable[[Header], bool]) -> NDArray[np.bool_]:
        return np.array([x.header is not None and condition(x.header) for x in looks], np.bool_)

    small = f"shorter than a view of {view} pixels on one side: what is cut from them is enlarged"
    grey = "grey images become RGB with three equal channels"
    turned = "they carry an EXIF orientation, and data.exif=ignore takes pixels as they are stored"
    yield from samples.among(those(lambda h: min(h.width, h.height) < view), "small_image", small)
    yield from samples.among(those(lambda h: h.mode in _GREY), "grey_image", grey)
    yield from samples.among(those(lambda h: h.mode == "CMYK"), "cmyk_image",
                             "CMYK images become RGB as Pillow does it")  # fmt: skip
    yield from samples.among(those(lambda h: h.orientation != 1), "exif_orientation", turned)
    constant = np.array([look.is_constant for look in looks], np.bool_)
    yield from samples.among(constant, "constant_image", "every pixel has the same colour")
    named = [_FORMATS.get(image.extension, image.extension) for image in samples.images]
    pairs = zip(looks, named, strict=True)
    misnamed = np.array([x.format not in ("", name) for x, name in pairs], np.bool_)
    other = "the name says another format than the content, which is believed"
    yield from samples.among(misnamed, "wrong_extension", other)


def image_facts(samples: Samples, looks: list[Look]) -> ImageFacts | None:
    """None where no header could be read."""
    headers = [look.header for look in looks if look.header is not None]
    if not headers:
        return None
    width = np.array([header.width for header in headers])
    height = np.array([header.height for header in headers])
    sizes = np.array([image.size for image in samples.images])
    return ImageFacts(
        with_header=len(headers),
        bytes=int(sizes.sum()),
        width=_spread(width),
        height=_spread(height),
        short_side=_spread(np.minimum(width, height)),
        megapixels=_spread(width * height / 1e6),
        kilobytes=_spread(sizes / 1e3),
        modes=dict(Counter(header.mode for header in headers).most_common()),
        formats=dict(Counter(look.format for look in looks if look.header).most_common()),
    )


def _spread(values: NDArray[np.int64] | NDArray[np.float64]) -> Spread:
    return Spread(float(values.min()), float(np.median(values)), float(values.max()))
