"""The transformer encoder, and the stem with it: what is exported, probed and finetuned."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.models.attention import QkvBias, aligned
from mimkit.models.blocks import EPS, Block
from mimkit.models.positions import RelativePositionBias, absolute_positions
from mimkit.models.stems import Stem

Positions = Literal["absolute", "relative", "relative_shared", "none"]


class Encoder(nn.Module):
    """tokens_BND of one grid -> tokens of width D, the class token first: (B, 1 + N, D).

    Args:
        width: D. heads: K. depth: L, number of blocks.
        grid: rows and columns of patches; positions belong to this grid.
        positions: "absolute" (BEiT's paper), "relative_shared" (BEiT's code: one bias for all
            blocks), "relative" (one bias a block, BEiT's finetuning) or "none".
        layer_scale: where LayerScale starts (BEiT: 0.1 for B, 1e-5 for L); None is without it.
        qkv_bias: "qv" as in BEiT, "qkv" as in ViT.
        branches: attentions and MLPs side by side in a block.
        activation_checkpointing: recompute blocks in backward; slower, a tenth of the memory.
        final_norm: LayerNorm after the last block.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        depth: int,
        grid: Grid,
        positions: Positions = "absolute",
        layer_scale: float | None = 0.1,
        qkv_bias: QkvBias = "qv",
        branches: int = 1,
        activation_checkpointing: bool = False,
        final_norm: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise UserError(
                f"a width of {width} does not divide into {heads} heads; see encoder.size"
            )
        self.width, self.heads, self.depth, self.grid = width, heads, depth, grid
        self.positions, self.layer_scale, self.qkv_bias = positions, layer_scale, qkv_bias
        self.branches, self.activation_checkpointing = branches, activation_checkpointing
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = (
            absolute_positions(grid=grid, width=width) if positions == "absolute" else None
        )
        tables = {"relative_shared": 1, "relative": depth}.get(positions, 0)
        self.relative = nn.ModuleList(
            RelativePositionBias(grid=grid, heads=heads) for _ in range(tables)
        )
        self.blocks = nn.ModuleList(
            Block(
                width,
                heads=heads,
                qkv_bias=qkv_bias,
                layer_scale=layer_scale,
                branches=branches,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, eps=EPS) if final_norm else nn.Identity()

    def forward(self, tokens_BND: Tensor, keep_LB2R: Tensor | None = None) -> Tensor:
        """After the final norm. `keep_LB2R` is drop path's multipliers (see `draw_keep`)."""
        last_BND = deque(self._states(tokens_BND, keep_LB2R), maxlen=1).pop()
        encoded_BND: Tensor = self.norm(last_BND)
        return encoded_BND

    def intermediates(self, tokens_BND: Tensor, blocks: Sequence[int]) -> list[Tensor]:
        """Tokens after each of the given blocks, counted from 1, before any final norm."""
        if not blocks or not all(1 <= block <= self.depth for block in blocks):
            raise UserError(f"blocks {list(blocks)} asked for; the encoder has 1..{self.depth}")
        states = islice(self._states(tokens_BND, None), max(blocks))
        after = {number: state for number, state in enumerate(states, start=1) if number in blocks}
        return [after[block] for block in blocks]

    def _states(self, tokens_BND: Tensor, keep_LB2R: Tensor | None) -> Iterator[Tensor]:
        """Tokens after each block, one block a step."""
        tokens_BND = self._embed(tokens_BND)
        bias_KNN = self._bias(0) if self.positions == "relative_shared" else None
        for index, block in enumerate(self.blocks):
            if self.positions == "relative":
                bias_KNN = self._bias(index)
            keep_B2R = None if keep_LB2R is None else keep_LB2R[index]
            tokens_BND = self._run(block, tokens_BND, bias_KNN, keep_B2R)
            yield tokens_BND

    def _bias(self, index: int) -> Tensor:
        bias_KNN: Tensor = self.relative[index]()
        if not bias_KNN.is_cuda:
            return bias_KNN
        half = torch.is_autocast_enabled("cuda")
        return aligned(bias_KNN, dtype=torch.get_autocast_dtype("cuda") if half else bias_KNN.dtype)

    def _embed(self, tokens_BND: Tensor) -> Tensor:
        rows, columns = self.grid
        if tokens_BND.shape[1] != rows * columns:
            raise UserError(
                f"the encoder was built for a grid of {rows}x{columns} patches but got "
                f"{tokens_BND.shape[1]} tokens; give it images of the size in data.image_size"
            )
        # not len(): torch.export would fix the batch at the one it traces with
        cls_B1D = self.cls_token.expand(tokens_BND.shape[0], -1, -1)
        tokens_BND = torch.cat([cls_B1D, tokens_BND], 1)
        return tokens_BND if self.pos_embed is None else tokens_BND + self.pos_embed

    def _run(
        self,
        block: nn.Module,
        tokens_BND: Tensor,
        bias_KNN: Tensor | None,
        keep_B2R: Tensor | None,
    ) -> Tensor:
        if not (self.activation_checkpointing and torch.is_grad_enabled()):
            return block(tokens_BND, bias_KNN=bias_KNN, keep_B2R=keep_B2R)  # type: ignore[no-any-return]
        # Drop path is an argument, so there is no random state to keep.
        return checkpoint(  # type: ignore[no-any-return]
            block,
            tokens_BND,
            bias_KNN=bias_KNN,
            keep_B2R=keep_B2R,
            use_reentrant=False,
            preserve_rng_state=False,
        )


class ImageEncoder(nn.Module):
    """image_BCHW (normalised) -> tokens (B, 1 + N, D): a stem and an encoder."""

    def __init__(self, stem: Stem, encoder: Encoder) -> None:
        super().__init__()
        self.stem = stem
        self.encoder = encoder

    def forward(self, image_BCHW: Tensor, keep_LB2R: Tensor | None = None) -> Tensor:
        encoded_BND: Tensor = self.encoder(self.stem(image_BCHW), keep_LB2R)
        return encoded_BND

    def intermediates(self, image_BCHW: Tensor, blocks: Sequence[int]) -> list[Tensor]:
        """Tokens after each of the given blocks, counted from 1, before any final norm."""
        return self.encoder.intermediates(self.stem(image_BCHW), blocks)
