"""Interface of a visual tokenizer, its registry, and the two lines that find the implementations.

The implementations stand in the top-level folder `tokenizers/`, which must not be importable under
that name: HuggingFace's package is called `tokenizers`. This module is a package to Python because
it has a `__path__`; in an installed wheel the folder lies beside this file.
"""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.registry import Registry

_installed = Path(__file__).parent / "tokenizers"
__path__ = [str(_installed if _installed.is_dir() else Path(__file__).parents[1] / "tokenizers")]

Self = TypeVar("Self", bound="VisualTokenizer")


class VisualTokenizer(nn.Module):
    """Turns the token view of an image into one target a patch, and judges predictions of it.

    A tokenizer is frozen: it is never trained by the encoder's loss. It owns its pixel mapping:
    views come as float32 in [0, 1]. `encode` is what every tokenizer must have besides the four
    values; `grid` is here as it is for square patches, `loss` as it is for tokens.
    """

    patch: int  # pixels of the token view along a side of what one target stands for
    prediction_dim: int  # V: the head predicts this many numbers a patch
    vocabulary: int | None  # number of different tokens; None where targets are not tokens
    fingerprint: str  # hash of everything that decides the targets

    def grid(self, height: int, width: int) -> Grid:
        """Rows and columns of targets for a token view of this size; UserError if impossible."""
        patch = self.patch
        if min(height, width) < patch or height % patch or width % patch:
            raise UserError(
                f"tokenizer '{TOKENIZERS.name_of(type(self))}' makes one target of {patch} x "
                f"{patch} pixels, which a token view of {height} x {width} is no multiple of; set "
                f"data.token_size to {patch} times the number of patches along a side"
            )
        return height // patch, width // patch

    @abstractmethod
    def encode(self, view_BChw: Tensor) -> Tensor:
        """float32 in [0, 1] -> target_BN (int64 tokens) or target_BNV (float32)."""

    def loss(self, predicted_MV: Tensor, target_M: Tensor) -> Tensor:
        """Mean over the masked patches, a scalar in float32; of tokens the cross-entropy, nats."""
        assert self.vocabulary is not None, f"{type(self).__name__} needs a loss of its own"
        return nn.functional.cross_entropy(predicted_MV.float(), target_M)

    def train(self: Self, mode: bool = True) -> Self:
        """Stays in eval mode: it is never trained by the encoder's loss."""
        super().train(False)
        return self

    def decode(self, target_BN: Tensor, grid: Grid) -> Tensor:
        """Targets -> image_BChw in [0, 1], where the tokenizer can."""
        raise NotImplementedError(f"{type(self).__name__} can not draw its targets")

    @property
    def can_decode(self) -> bool:
        return type(self).decode is not VisualTokenizer.decode


TOKENIZERS: Registry[Callable[..., VisualTokenizer]] = Registry("tokenizer", __name__)
