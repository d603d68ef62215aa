"""The hierarchical MLP stem of "Three things everyone should know about Vision Transformers"."""

from torch import nn

from mimkit.errors import UserError
from mimkit.models.norms import Statistics
from mimkit.models.stems import STEMS
from mimkit.models.stems._layers import LayeredStem, Norm, make_norm
from mimkit.models.stems._rows import PatchConv2d

# Patch size -> kernel = stride of each layer. The rule: at least two layers (one is `linear` with a
# norm); every layer after the first merges 2x2; the first takes the rest, and is 4x4 as published
# where the size allows it. 14 = 7 * 2, not 2 * 7: a 7x7 kernel on 3 channels costs 147 weights an
# output channel (4x4: 48), on D/4 channels it would cost 12 D. (The paper's text starts with 2x2;
# its listing and the authors' code, models_v2.py `hMLP_stem`, with 4x4.)
FACTORS = {4: (2, 2), 8: (4, 2), 14: (7, 2), 16: (4, 2, 2), 32: (4, 2, 2, 2)}


@STEMS.register
class Hmlp(LayeredStem):
    """Non-overlapping convolutions, each with a norm, with GELU between them and none at the end.

    For 16 x 16: Conv(3 -> D/4, 4) norm GELU, Conv(D/4 -> D/4, 2) norm GELU, Conv(D/4 -> D, 2) norm
    (P, appendix C). Other sizes follow FACTORS, with D/4 channels up to the last layer.

    Args:
        width: D, a multiple of 4.
        patch_size: one of FACTORS.
        norm: "bn", the paper's main row, over the batch of all ranks; "ln", over channels; "none".
        statistics: of "bn": "all" (the paper's), "visible" or "frozen", see `BatchNorm2d`.
    """

    def __init__(
        self,
        *,
        width: int,
        patch_size: int = 16,
        norm: Norm = "bn",
        statistics: Statistics = "all",
    ) -> None:
        _check(width, patch_size)
        layers = _layers(width, FACTORS[patch_size], norm, statistics)
        super().__init__(width=width, patch_size=patch_size, layers=layers)
        self.norm, self.statistics = norm, statistics

    @property
    def settings(self) -> dict[str, int | str]:
        return {"width": self.width, "patch_size": self.patch_size, "norm": self.norm,
                "statistics": self.statistics}  # fmt: skip


def _layers(
    width: int, factors: tuple[int, ...], norm: Norm, statistics: Statistics
) -> list[nn.Module]:
    layers: list[nn.Module] = []
    inputs = 3
    for position, factor in enumerate(factors, start=1):
        last = position == len(factors)
        outputs = width if last else width // 4
        layers.append(PatchConv2d(inputs, outputs, factor))
        layers.append(make_norm(norm, outputs, statistics=statistics))
        layers += [] if last else [nn.GELU()]
        inputs = outputs
    return layers


def _check(width: int, patch_size: int) -> None:
    if patch_size not in FACTORS:
        sizes = ", ".join(map(str, FACTORS))
        raise UserError(
            f"stem 'hmlp' has no layers for patches of {patch_size}; set encoder.patch_size to one "
            f"of {sizes}, or stem.name to linear"
        )
    if width % 4:
        raise UserError(f"stem 'hmlp' needs a width that is a multiple of 4, not {width}")
