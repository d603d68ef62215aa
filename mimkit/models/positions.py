"""Where a token is: absolute embeddings, or a bias on the attention scores by relative place."""

import copy

import torch

# timm's index of relative places is BEiT's own; its RelPosBias is read outside `forward`, which
# ZeRO-3 has to guess, and starts from noise where BEiT starts from zero.
from timm.layers.pos_embed_rel import gen_relative_position_index
from torch import Tensor, nn

from mimkit.batch import Grid


def absolute_positions(*, grid: Grid, width: int) -> nn.Parameter:
    """Learned embeddings (1, 1 + N, D), the class token's first, then patches row by row."""
    return nn.Parameter(torch.zeros(1, 1 + grid[0] * grid[1], width))


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
        index = gen_relative_position_index(grid, class_token=True)
        self.register_buffer("index", index.flatten(), persistent=False)

    def forward(self) -> Tensor:
        """bias_KNN, to be added to the attention scores (N counts the class token here)."""
        bias_NNK = self.table[self.index].view(self.tokens, self.tokens, -1)
        return bias_NNK.permute(2, 0, 1).contiguous()


def per_block(shared: nn.Module, *, depth: int) -> nn.ModuleList:
    """The shared bias once for each block, to be trained apart from then on."""
    return nn.ModuleList(copy.deepcopy(shared) for _ in range(depth))
