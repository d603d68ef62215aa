"""A stem with a well-known bug, for the self-test of a study: it has to lose."""

from torch import Tensor

from mimkit.models.stems.linear import Linear

_EVERYTHING = 1 << 15  # pixels, more than a side of any image here


class Damaged(Linear):
    """Linear, but patches are read straight through memory: `view` where `permute` was needed.

    Each "patch" is a few scan lines of one colour, so that tokens neither lie where positions and
    targets say, nor show what a patch shows.
    """

    @property
    def reach_sides(self) -> tuple[int, int]:
        """All of an image of any size: some lines of a strip may come from its other end."""
        return _EVERYTHING, _EVERYTHING

    def forward(self, image_BCHW: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        rows, columns = self.grid(*image_BCHW.shape[2:])
        side = self.patch_size
        strips = image_BCHW.contiguous().view(-1, rows, columns, 3, side, side)
        wrong_BCHW = strips.permute(0, 3, 1, 4, 2, 5).reshape(image_BCHW.shape)
        return super().forward(wrong_BCHW, mask_BN)
