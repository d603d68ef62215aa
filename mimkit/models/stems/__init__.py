"""A stem turns pixels into one token a patch. Contract, and the registry over this folder."""

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.registry import Registry


class Stem(nn.Module):
    """image_BCHW (normalised) -> tokens_BND, patches row by row.

    Every stem takes `width` (D) and `patch_size` as keyword arguments, and what it needs besides.
    """

    width: int
    patch_size: int

    @abstractmethod
    def forward(self, image_BCHW: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """Tokens of every patch; those that `mask_BN` names may be anything finite.

        The mask only tells a stem what it need not compute, and which patches batch statistics
        leave out if they are told to. It hides no pixels: that is the placement's work.
        """

    @property
    @abstractmethod
    def reach_sides(self) -> tuple[int, int]:
        """Pixels before (above, left of) and behind its own patch that a token sees."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, int | str]:
        """Keyword arguments that build this stem again, for exports that must rebuild it."""

    @property
    def reach(self) -> int:
        """Pixels beyond its own patch that a token can see, computed from the layers."""
        return max(self.reach_sides)

    @property
    def patchwise(self) -> bool:
        """Whether a token depends on its own patch only (batch statistics apart)."""
        return self.reach == 0

    def grid(self, height: int, width: int) -> Grid:
        """Rows and columns of tokens for an image of this size in pixels."""
        if height % self.patch_size or width % self.patch_size:
            raise UserError(
                f"an image of {height}x{width} pixels does not divide into patches of "
                f"{self.patch_size}; set data.image_size to a multiple of {self.patch_size}"
            )
        return height // self.patch_size, width // self.patch_size

    def folded(self) -> "Stem":
        """A copy for inference whose batch norms are part of the convolutions before them.

        Raises:
            UserError: there is no batch norm to fold.
        """
        raise UserError(f"stem '{self.name}' has no batch norm that could be folded")

    @property
    def name(self) -> str:
        """What `STEMS` knows it by: its file's name, or where a user's own code is."""
        return STEMS.name_of(type(self))


STEMS: Registry[Callable[..., Stem]] = Registry("stem", __name__)
