"""Sizes of vision transformers: width, heads, depth (ViT, DeiT)."""

from typing import NamedTuple


class Size(NamedTuple):
    """Width D, heads K and number of blocks L."""

    width: int
    heads: int
    depth: int


SIZES = {
    "Ti": Size(192, 3, 12),
    "S": Size(384, 6, 12),
    "B": Size(768, 12, 12),
    "L": Size(1024, 16, 24),
    "H": Size(1280, 16, 32),
}
