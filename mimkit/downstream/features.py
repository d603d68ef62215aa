"""What a frozen encoder says of images: pooled after every block, and all tokens of a few."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mimkit.batch import Batch, normalise, to_unit
from mimkit.errors import UserError
from mimkit.models.encoder import ImageEncoder

POOLINGS = ("mean", "cls", "cls+mean")  # of the patch tokens, of the class token, both side by side


@dataclass(frozen=True)
class Features:
    """Of the images of a split. Arrays may lie on disk (memory maps).

    Attributes:
        pooled_BLPD: float32; P: mean of the patch tokens, class token.
        layers: number of the block of each L, from 1; the last block's include the final norm.
        label_B: int64.
        index_B: int64, the images' numbers in their source.
        tokens_BLND: float16, patch tokens after `token_layers`; None where nobody needs them.
    """

    pooled_BLPD: NDArray[np.float32]
    layers: tuple[int, ...]
    label_B: Tensor
    index_B: Tensor
    tokens_BLND: NDArray[np.float16] | None = None
    token_layers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.label_B)

    def of(self, layer: int, pooling: str) -> Tensor:
        """feature_BF float32; F is D, or 2 D for cls+mean."""
        pooled_BPD = self.pooled_BLPD[:, self.layers.index(layer)]
        chosen = {"mean": slice(0, 1), "cls": slice(1, 2), "cls+mean": slice(0, 2)}[pooling]
        return torch.from_numpy(np.array(pooled_BPD[:, chosen])).flatten(1)


Extractor = Callable[[Batch], Mapping[str, Tensor]]  # name -> (B, ...)


class Allocate(Protocol):
    """Where the features of a split go: memory, or a file."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]: ...


def in_memory(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros, as in a new memory map."""
    return np.zeros(shape, dtype)


class Extracted(NamedTuple):
    """What the extractor gave for every real (not padded) image, in the order of the batches."""

    arrays: dict[str, NDArray[Any]]
    label_B: Tensor
    index_B: Tensor


@torch.no_grad()
def extract(
    extractor: Extractor,
    batches: Iterable[Batch],
    *,
    num_images: int,
    rank: int = 0,
    world: int = 1,
    allocate: Allocate = in_memory,
    progress: Callable[[int], object] = lambda images: None,
) -> Extracted:
    """One pass over the images that `eval_loader` gives this rank; those of others stay 0.

    Args:
        num_images: of all ranks.
        progress: told how many images were just done.

    Raises:
        UserError: a feature is not finite.
    """
    arrays: dict[str, NDArray[Any]] = {}
    label_B, index_B = (torch.zeros(num_images, dtype=torch.int64) for _ in range(2))
    for number, batch in enumerate(batches):
        real_B = batch.index_B >= 0
        first = (number * world + rank) * len(real_B)
        rows = slice(first, first + int(real_B.sum()))
        label_B[rows], index_B[rows] = batch.label_B[real_B], batch.index_B[real_B]
        for name, value in extractor(batch).items():
            found = value.cpu().numpy()[real_B.numpy()]
            if name not in arrays:
                arrays[name] = allocate(name, (num_images, *found.shape[1:]), found.dtype)
            if not np.isfinite(found).all():
                raise UserError(
                    f"the encoder's features ({name}) of images {index_B[rows].tolist()[:3]}... "
                    "are not finite: its weights are damaged, or its training diverged"
                )
            arrays[name][rows] = found
        progress(rows.stop - rows.start)
    return Extracted(arrays, label_B, index_B)


def summed(own: Extracted, sum_over_ranks: Callable[[Tensor], Tensor]) -> Extracted:
    """What all ranks extracted together, on all of them; exact, for each row is one rank's."""
    arrays = {name: sum_over_ranks(torch.from_numpy(array)).numpy()
              for name, array in own.arrays.items()}  # fmt: skip
    return Extracted(arrays, sum_over_ranks(own.label_B), sum_over_ranks(own.index_B))


def encoder_features(
    encoder: ImageEncoder,
    *,
    layers: Sequence[int],
    token_layers: Sequence[int] = (),
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
) -> Extractor:
    """`pooled` (B, L, P, D) and, where `token_layers` are named, `tokens` (B, L, N, D) of a frozen
    encoder; see `Features`."""
    encoder = encoder.to(device).eval()
    wanted = sorted({*layers, *token_layers})

    @torch.no_grad()
    def features(batch: Batch) -> dict[str, Tensor]:
        image_BCHW = normalise(batch.patch_view_BCHW.to(device), mean=mean, std=std)
        states = encoder.intermediates(image_BCHW, wanted)
        after = dict(zip(wanted, states, strict=True))
        last = encoder.encoder.depth
        if last in after:
            after[last] = encoder.encoder.norm(after[last])
        pooled = [torch.stack([after[n][:, 1:].mean(1), after[n][:, 0]], 1) for n in layers]
        found = {"pooled": torch.stack(pooled, 1).float()}
        if token_layers:
            # Half a float32's bytes; rounding (5e-4) is far below what a probe can see.
            found["tokens"] = torch.stack([after[n][:, 1:] for n in token_layers], 1).half()
        return found

    return features


def pixel_features(batch: Batch, *, size: int = 32) -> dict[str, Tensor]:
    """The image itself, averaged down to `size` x `size` pixels, as `pixels` (B, 1, 1, F): what an
    encoder must beat."""
    view_BCHW = to_unit(batch.patch_view_BCHW)
    small_BF = nn.functional.adaptive_avg_pool2d(view_BCHW, size).flatten(1)
    return {"pixels": small_BF[:, None, None]}
