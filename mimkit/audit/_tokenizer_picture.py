"""What a tokenizer sees and says, as a picture: token views, redrawn, and the words as colours."""

import colorsys

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from mimkit.audit.tokenizer import redrawn
from mimkit.batch import Grid, to_unit
from mimkit.tokenizers import VisualTokenizer
from mimkit.train.pictures import picture_grid

_TURN = 0.618034  # of the hue, from a word to the next: neighbours in number look different
_SHADES = ((0.85, 0.95), (0.55, 1.0), (0.9, 0.6))  # saturation, brightness


@torch.no_grad()
def tokenizer_picture(
    tokenizer: VisualTokenizer, token_view_u8: Tensor, *, device: torch.device | str = "cpu"
) -> Image.Image:
    """One row an image: the view, what it is redrawn as if it can be, its targets as colours.

    A word has the same colour everywhere. Of targets that are numbers, the three directions in
    which they differ most are red, green and blue.
    """
    view_BChw = to_unit(token_view_u8).to(device)
    height, width = view_BChw.shape[2:]
    grid = tokenizer.grid(height, width)
    columns = {"token view": view_BChw}
    if tokenizer.can_decode:
        columns["redrawn"] = redrawn(tokenizer, view_BChw)
    target = tokenizer.encode(view_BChw).cpu()
    words = not target.is_floating_point()
    colour_BNC = _word_colours(target) if words else _main_directions(target)
    columns["a colour a word" if words else "main directions"] = _tiles(
        colour_BNC, grid, (height, width)
    )
    return picture_grid(list(columns.values()), tuple(columns))


def _word_colours(target_BN: Tensor) -> Tensor:
    colours = [
        colorsys.hsv_to_rgb(word * _TURN % 1, *_SHADES[word % len(_SHADES)])
        for word in target_BN.flatten().tolist()
    ]
    return torch.tensor(colours).view(*target_BN.shape, 3)


def _main_directions(target_BNV: Tensor) -> Tensor:
    """Principal components of all patches, from the least to the largest value as 0..1."""
    flat_MV = target_BNV.flatten(0, 1).double()
    centred_MV = flat_MV - flat_MV.mean(0)
    _, direction_VV = torch.linalg.eigh(centred_MV.T @ centred_MV)
    main_MC = centred_MV @ direction_VV[:, -3:].flip(1)
    low_C, high_C = main_MC.amin(0), main_MC.amax(0)
    colour_MC = ((main_MC - low_C) / (high_C - low_C).clamp_min(1e-12)).float()
    missing = 3 - colour_MC.shape[1]  # of targets of one or two numbers
    return pad(colour_MC, (0, missing)).view(*target_BNV.shape[:2], 3)


def _tiles(colour_BNC: Tensor, grid: Grid, size: tuple[int, int]) -> Tensor:
    colour_BCrc = colour_BNC.view(len(colour_BNC), *grid, 3).permute(0, 3, 1, 2)
    return interpolate(colour_BCrc, size, mode="nearest")
