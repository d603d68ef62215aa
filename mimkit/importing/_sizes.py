"""What an encoder must be, read off its weights: sizes, grid, kind of positions, stem."""

import math
import re
from collections.abc import Mapping

from torch import Tensor

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.models.encoder import Encoder, ImageEncoder, Positions
from mimkit.models.sizes import SIZES
from mimkit.models.stems import STEMS, Stem

_LINEAR, _HMLP = "stem.project.weight", "stem.layers.6.weight"
_CLASS, _POSITIONS = "encoder.cls_token", "encoder.pos_embed"
_BLOCK = re.compile(r"encoder\.blocks\.(\d+)\.(?:attns|ffns)\.(\d+)\.")
_TABLE = re.compile(r"encoder\.relative\.(\d+)\.table")
_EXTRA = 3  # rows of a relative table behind those of pairs of patches
_ANY_SCALE = 1e-5  # where LayerScale would start; the file's values replace it


def make_stem(weights: Mapping[str, Tensor]) -> Stem:
    """A linear stem, or deit's hMLP; UserError where the file has neither."""
    if _HMLP in weights:
        return STEMS["hmlp"](width=len(weights[_HMLP]))
    if _LINEAR not in weights:
        raise UserError(
            "the file has no patch embedding under a name that mimkit knows, so it is no encoder "
            "of images, or of another layout"
        )
    width, channels, *sides = weights[_LINEAR].shape
    if channels != 3 or len(sides) != 2 or sides[0] != sides[1]:
        raise UserError(
            f"the patch embedding has the shape {tuple(weights[_LINEAR].shape)}; mimkit takes "
            "square patches of three channels: (width, 3, patch, patch)"
        )
    return STEMS["linear"](width=width, patch_size=sides[0])


def make_encoder(
    weights: Mapping[str, Tensor], *, heads: int | None, image_size: tuple[int, int] | None
) -> ImageEncoder:
    """An encoder of ours that these weights fit, not yet filled.

    Args:
        weights: under our names, biases joined.
        heads: None to take what the relative tables say, else the standard number of this width.
        image_size: pixels whose patches the positions are; None for a square.

    Raises:
        UserError: it has no class token, two kinds of positions, or a number is not to be had.
    """
    if _CLASS not in weights:
        raise UserError(
            "the file has no class token, and every encoder of mimkit has one; take weights of a "
            "model with one"
        )
    stem, positions = make_stem(weights), _positions(weights)
    blocks = [found for name in weights if (found := _BLOCK.match(name))]
    encoder = Encoder(
        width=stem.width,
        heads=_heads(weights, stem.width, heads),
        depth=1 + max((int(found[1]) for found in blocks), default=0),
        grid=_grid(weights, stem, image_size),
        positions=positions,
        layer_scale=_ANY_SCALE if any(".ls." in name for name in weights) else None,
        qkv_bias="qkv" if any(name.endswith(".qkv.bias") for name in weights) else "qv",
        branches=1 + max((int(found[2]) for found in blocks), default=0),
        final_norm="encoder.norm.weight" in weights,
    )
    return ImageEncoder(stem, encoder)


def _tables(weights: Mapping[str, Tensor]) -> list[Tensor]:
    return [weights[name] for name in weights if _TABLE.fullmatch(name)]


def _positions(weights: Mapping[str, Tensor]) -> Positions:
    tables = len(_tables(weights))
    if tables and _POSITIONS in weights:
        raise UserError(
            "the file has both position embeddings and relative position biases; an encoder of "
            "mimkit has one of them (encoder.positions)"
        )
    if not tables:
        return "absolute" if _POSITIONS in weights else "none"
    depth = len({found[1] for name in weights if (found := _BLOCK.match(name))})
    return "relative_shared" if tables == 1 and depth > 1 else "relative"


def _heads(weights: Mapping[str, Tensor], width: int, asked: int | None) -> int:
    if tables := _tables(weights):
        found = tables[0].shape[1]
        if asked not in (None, found):
            raise UserError(
                f"{asked} heads were asked for (--heads, or config.json), but the relative "
                f"position bias is for {found}; leave that out"
            )
        return found
    standard = {size.width: size.heads for size in SIZES.values()}
    if asked is None and width not in standard:
        raise UserError(
            f"no file of weights says its number of heads, and a width of {width} has no standard "
            f"one ({', '.join(f'{w}: {h}' for w, h in standard.items())}); say it with --heads"
        )
    if asked is not None and (asked < 1 or width % asked):
        raise UserError(f"{asked} heads do not divide a width of {width}; say others with --heads")
    return standard[width] if asked is None else asked


def _grid(weights: Mapping[str, Tensor], stem: Stem, image_size: tuple[int, int] | None) -> Grid:
    if image_size is not None:
        return stem.grid(*image_size)
    if _POSITIONS in weights:
        slots = weights[_POSITIONS].shape[1]
        side = math.isqrt(slots)  # n^2 and n^2 + 1 both round down to n
        if slots - side**2 in (0, 1):
            return side, side
        return _not_square(f"{slots} position embeddings")
    if tables := _tables(weights):
        offsets = tables[0].shape[0] - _EXTRA
        if (side := math.isqrt(max(0, offsets))) % 2 and side**2 == offsets:
            return (side + 1) // 2, (side + 1) // 2
        return _not_square(f"a relative table of {offsets + _EXTRA} rows")
    raise UserError(
        "the file has no positions, so nothing says for which images it is; give --image-size"
    )


def _not_square(found: str) -> Grid:
    raise UserError(
        f"the file has {found}, which is no square of patches and a class token; give the size of "
        "images it was trained on: --image-size HxW"
    )
