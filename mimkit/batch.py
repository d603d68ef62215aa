"""The vocabulary of the package: what travels from a tar to the training step.

Shape letters, used as suffixes of tensor names everywhere:
B images, N patches, D width, M masked patches, V prediction size (vocabulary), K heads, L layers,
R branches of a block; C channels, H W the encoder's view, h w the tokenizer's view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NO_LABEL = -1
Grid = tuple[int, int]  # rows, columns; patches are numbered row by row


@dataclass(frozen=True)
class Sample:
    """One image as it lies in a source: encoded bytes, and where they came from."""

    index: int
    key: str
    image: bytes
    label: int
    origin: str  # "shard.tar at byte 512", for messages


class Views(NamedTuple):
    """One crop rendered twice; uint8, 0..255."""

    patch_view_CHW: Tensor
    token_view_Chw: Tensor


_NO_TOKENS = torch.empty((0, 0), dtype=torch.int32)


class Batch(NamedTuple):
    """What the training step gets. Pixels are uint8 until they are on the device."""

    patch_view_BCHW: Tensor  # uint8
    token_view_BChw: Tensor  # uint8
    mask_BN: Tensor  # bool, True where the patch is masked
    label_B: Tensor  # int64, NO_LABEL where there is none
    index_B: Tensor  # int64, the sample's number in its source
    token_BN: Tensor = _NO_TOKENS  # int32, out of a token bank; empty where there is none

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(field.to(device, non_blocking=True) for field in self))

    def pin_memory(self) -> "Batch":
        return Batch(*(field.pin_memory() for field in self))


@dataclass(frozen=True)
class Item:
    """What a worker makes of one place in a batch."""

    views: Views
    mask_N: Tensor
    label: int
    index: int
    token_N: Tensor


def collate(items: Sequence[Item]) -> Batch:
    """One row of the batch for each item."""
    return Batch(
        patch_view_BCHW=torch.stack([item.views.patch_view_CHW for item in items]),
        token_view_BChw=torch.stack([item.views.token_view_Chw for item in items]),
        mask_BN=torch.stack([item.mask_N for item in items]),
        label_B=torch.tensor([item.label for item in items]),
        index_B=torch.tensor([item.index for item in items]),
        token_BN=torch.stack([item.token_N for item in items]),
    )


def at_masked(values: Tensor, mask_BN: Tensor, num_masked: int | None = None) -> Tensor:
    """Values (B, N, ...) of the masked patches (M, ...), image by image, row by row.

    Args:
        num_masked: how many every image has, where that is known: then the number of rows is too,
            and a GPU need not wait to be asked for it. The rows are the same ones.

    Raises:
        RuntimeError: an image has another number of them; from a GPU it comes later.
    """
    if num_masked is None:
        return values[mask_BN]
    torch._assert_async(
        (mask_BN.sum(1) == num_masked).all(),
        f"an image has not exactly {num_masked} masked patches, which its mask promises",
    )
    index_BM = mask_BN.byte().argsort(dim=1, descending=True, stable=True)[:, :num_masked]
    first_B1 = torch.arange(mask_BN.shape[0], device=mask_BN.device)[:, None] * mask_BN.shape[1]
    return values.flatten(0, 1).index_select(0, (first_B1 + index_BM).flatten())


def to_unit(view_u8: Tensor) -> Tensor:
    """uint8 0..255 -> float32 in [0, 1]: what a tokenizer takes."""
    return view_u8.float() / 255


def normalise(view_u8: Tensor, *, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 ...CHW -> float32, (x / 255 - mean) / std a channel: what a stem takes."""
    mean_C11, std_C11 = (_channels(values, view_u8.device) for values in (mean, std))
    return (to_unit(view_u8) - mean_C11) / std_C11


def _channels(values: Sequence[float], device: torch.device) -> Tensor:
    """Filled on the device: copied from the host it would wait for everything before it."""
    filled = [torch.full((), value, device=device, dtype=torch.float32) for value in values]
    return torch.stack(filled).view(-1, 1, 1)
