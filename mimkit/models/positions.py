"""Where a token is: absolute embeddings, or a bias on the attention scores by relative place."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimkit.batch import Grid


def absolute_positions(*, grid: Grid, width: int) -> nn.Parameter:
    """Learned embeddings (1, 1 + N, D), the class token's first, then patches row by row."""
    return nn.Parameter(torch.zeros(1, 1 + grid[0] * grid[1], width))


def relative_places(grid: Grid) -> Tensor:
    """BEiT's number (1 + N, 1 + N) of where a key lies as seen from a query; the class token's
    first, which has the last three: to patches, from patches, to itself."""
    height, width = grid
    row_N, column_N = (place.flatten() for place in torch.meshgrid(
        torch.arange(height), torch.arange(width), indexing="ij"))  # fmt: skip
    down_NN = row_N[:, None] - row_N + height - 1
    right_NN = column_N[:, None] - column_N + width - 1
    place_NN = functional.pad(down_NN * (2 * width - 1) + right_NN, (1, 0, 1, 0))
    last = (2 * height - 1) * (2 * width - 1)
    place_NN[0], place_NN[:, 0], place_NN[0, 0] = last, last + 1, last + 2
    return place_NN


class RelativePositionBias(nn.Module):
    """One learned number for each head and relative place, as in BEiT; starts at zero.

    The table has (2 rows - 1) (2 columns - 1) rows for pairs of patches and three more: class token
    to patch, patch to class token, class token to itself (14x14: 732).
    """

    index: Tensor

    def __init__(self, *, grid: Grid, heads: int) -> None:
        super().__init__()
        self.tokens = 1 + grid[0] * grid[1]
        places = (2 * grid[0] - 1) * (2 * grid[1] - 1) + 3
        self.table = nn.Parameter(torch.zeros(places, heads))
        index = relative_places(grid)
        self.register_buffer("index", index.flatten(), persistent=False)

    def forward(self) -> Tensor:
        """bias_KNN, to be added to the attention scores (N counts the class token here)."""
        bias_NNK = self.table[self.index].view(self.tokens, self.tokens, -1)
        return bias_NNK.permute(2, 0, 1).contiguous()


def per_block(shared: nn.Module, *, depth: int) -> nn.ModuleList:
    """The shared bias once for each block, to be trained apart from then on."""
    return nn.ModuleList(copy.deepcopy(shared) for _ in range(depth))
