"""Interface of a visual tokenizer, its registry, and the two lines that find the implementations.

The implementations stand in the top-level folder `tokenizers/`, which must not be importable under
that name: HuggingFace's package is called `tokenizers`. This module is a package to Python because
it has a `__path__`; in an installed wheel the folder lies beside this file.
"""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.registry import Registry

_installed = Path(__file__).parent / "tokenizers"
__path__ = [str(_installed if _installed.is_dir() else Path(__file__).parents[1] / "tokenizers")]


class VisualTokenizer(nn.Module):
    """Turns the token view of an image into one target a patch, and judges predictions of it.

    A tokenizer is frozen: it is never trained by the encoder's loss. It owns its pixel mapping:
    views come as float32 in [0, 1].
    """

    prediction_dim: int  # V: the head predicts this many numbers a patch
    vocabulary: int | None  # number of different tokens; None where targets are not tokens
    fingerprint: str  # hash of everything that decides the targets

    @abstractmethod
    def grid(self, height: int, width: int) -> Grid:
        """Rows and columns of targets for a token view of this size; UserError if impossible."""

    @abstractmethod
    def encode(self, view_BChw: Tensor) -> Tensor:
        """float32 in [0, 1] -> target_BN (int64 tokens) or target_BNV (float32)."""

    @abstractmethod
    def loss(self, predicted_MV: Tensor, target_M: Tensor) -> Tensor:
        """Mean loss over the masked patches; a scalar in float32."""

    def decode(self, target_BN: Tensor, grid: Grid) -> Tensor:
        """Targets -> image_BChw in [0, 1], where the tokenizer can."""
        raise NotImplementedError(f"{type(self).__name__} can not draw its targets")

    @property
    def can_decode(self) -> bool:
        return type(self).decode is not VisualTokenizer.decode


TOKENIZERS: Registry[Callable[..., VisualTokenizer]] = Registry("tokenizer", __name__)
