"""A sequential encoder as a parallel one: consecutive blocks become branches of one block."""

import copy
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.models.blocks import Block
from mimkit.models.encoder import Encoder, ImageEncoder


def regroup(model: ImageEncoder, *, branches: int) -> ImageEncoder:
    """A copy whose block i is made of blocks R i to R i + R - 1 of `model`, weights as they are.

    The copy computes something else: branches of a block do not see each other's residuals, which
    is an error of second order in the residuals' size (`movement` measures it).

    Args:
        model: of one branch a block.
        branches: R; the depth must be a multiple of it.

    Raises:
        UserError: the depth does not divide, the encoder is parallel already, or each of its
            blocks has its own relative bias.
    """
    _check(model.encoder, branches)
    grouped = copy.deepcopy(model)
    blocks = [cast(Block, block) for block in grouped.encoder.blocks]
    for first in range(0, len(blocks), branches):
        for other in blocks[first + 1 : first + branches]:
            blocks[first].attns.extend(other.attns)
            blocks[first].ffns.extend(other.ffns)
    grouped.encoder.blocks = nn.ModuleList(blocks[::branches])
    grouped.encoder.depth, grouped.encoder.branches = len(blocks) // branches, branches
    return grouped


class Movement(NamedTuple):
    """How far a token is from where it was, relative to its norm, after one parallel block."""

    block: int  # of the parallel encoder, counted from 1
    mean: float  # over the tokens of all images
    max: float


@torch.no_grad()
def movement(sequential: ImageEncoder, grouped: ImageEncoder, image_BCHW: Tensor) -> list[Movement]:
    """Tokens after each block of `grouped` beside those after its last block in `sequential`.

    Before the final norm, class token and patches alike; both in eval mode. Rounding alone moves
    float32 tokens by about 1e-7.
    """
    assert not sequential.training and not grouped.training
    depth, branches = grouped.encoder.depth, grouped.encoder.branches
    numbers = range(1, depth + 1)
    before = sequential.intermediates(image_BCHW, [branches * number for number in numbers])
    after = grouped.intermediates(image_BCHW, list(numbers))
    moved = []
    for number, old_BND, new_BND in zip(numbers, before, after, strict=True):
        share_BN = (new_BND - old_BND).norm(dim=-1) / old_BND.norm(dim=-1)
        moved.append(Movement(number, share_BN.mean().item(), share_BN.max().item()))
    return moved


def _check(encoder: Encoder, branches: int) -> None:
    if not all(isinstance(block, Block) for block in encoder.blocks):
        raise UserError("a fused encoder cannot be regrouped; regroup it first, then fuse it")
    if encoder.branches != 1:
        raise UserError(
            f"the encoder has {encoder.branches} branches a block; only one with "
            "encoder.branches=1 can be regrouped"
        )
    divisors = [number for number in range(1, encoder.depth + 1) if encoder.depth % number == 0]
    if branches not in divisors:
        raise UserError(
            f"{encoder.depth} blocks do not make groups of {branches}; regroup by one of "
            f"{', '.join(map(str, divisors))}"
        )
    if encoder.positions == "relative" and branches > 1:
        raise UserError(
            "encoder.positions is relative: each block has its own bias, but branches of one "
            "block share one; only absolute, relative_shared and none can be regrouped"
        )
