"""How far beyond its own patch a token sees, computed from the layers of a stem."""

from collections.abc import Iterable

from torch import nn

from mimkit.models.norms import BatchNorm2d, ChannelLayerNorm

_POINTWISE = (nn.Identity, nn.GELU, nn.ReLU, nn.Hardswish, nn.BatchNorm2d, BatchNorm2d)
_PER_POSITION = (*_POINTWISE, ChannelLayerNorm)


def reach_of(layers: Iterable[nn.Module]) -> tuple[int, int]:
    """Pixels that a token sees before (above, left of) its own patch, and behind it.

    Args:
        layers: applied one after the other: convolutions, and layers that act on each position.

    Token 0's own patch is pixels 0 to s - 1, s the product of the strides. Walking back from the
    token, output o of a convolution reads inputs o * stride - padding onwards (Araujo et al. 2019,
    "Computing receptive fields of convolutional neural networks").
    """
    first, last, patch = 0, 0, 1
    for layer in reversed(list(layers)):
        if isinstance(layer, nn.Conv2d):
            (kernel, stride, padding, dilation) = _geometry(layer)
            first = first * stride - padding
            last = last * stride - padding + dilation * (kernel - 1)
            patch *= stride
        elif not isinstance(layer, _PER_POSITION):
            raise TypeError(f"the reach of {type(layer).__name__} is not known; add it to reach_of")
    return max(0, -first), max(0, last - (patch - 1))


def _geometry(layer: nn.Conv2d) -> tuple[int, int, int, int]:
    """Kernel, stride, padding and dilation along one side; stems are square."""
    assert not isinstance(layer.padding, str)
    sides = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    assert all(side[0] == side[1] for side in sides)
    kernel, stride, padding, dilation = (side[0] for side in sides)
    return kernel, stride, padding, dilation
