"""Fused blocks give what branch by branch gives, and in few matrix products."""

import pytest
import torch
from torch import nn

from mimkit.errors import UserError
from mimkit.models.blocks import Block, draw_keep
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.fused import FusedBlock, fused
from mimkit.models.init import initialise
from mimkit.models.regroup import regroup
from mimkit.models.stems import STEMS

POSITIONS = ["absolute", "relative_shared", "relative", "none"]
BRANCHES = [1, 2, 3, 4]


def shake(module: nn.Module) -> None:
    """Every parameter away from where it starts, so that no scale is one and no shift zero."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)


def make_model(**settings) -> ImageEncoder:
    encoder = Encoder(**{"width": 32, "heads": 4, "depth": 3, "grid": (2, 3), **settings})
    model = ImageEncoder(STEMS["linear"](width=32), encoder)
    initialise(model, seed=0)
    shake(model)
    return model.eval()


def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 48, generator=torch.Generator().manual_seed(2))


def keep(branches: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(4)
    return draw_keep([0.2, 0.4, 0.6], batch=4, branches=branches, generator=noise)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("layer_scale", [0.1, None])
@pytest.mark.parametrize("dropping", [False, True])
def test_the_same_tokens_at_every_depth(positions, branches, layer_scale, dropping) -> None:
    model = make_model(positions=positions, branches=branches, layer_scale=layer_scale)
    wide = fused(model)
    keep_LB2R = keep(branches) if dropping else None
    with torch.no_grad():
        expected, got = model(images(), keep_LB2R), wide(images(), keep_LB2R)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        for one, other in zip(model.intermediates(images(), [1, 2, 3]),
                              wide.intermediates(images(), [1, 2, 3]), strict=True):  # fmt: skip
            torch.testing.assert_close(other, one, rtol=0, atol=1e-5)
        if dropping:  # the multipliers were not ignored on both sides
            assert (expected - model(images())).abs().max() > 0.1


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("qkv_bias", ["qv", "qkv"])
@pytest.mark.parametrize("dropping", [False, True])
def test_the_same_gradient_for_the_tokens(branches: int, qkv_bias: str, dropping: bool) -> None:
    block = Block(32, heads=4, qkv_bias=qkv_bias, layer_scale=0.1, branches=branches)
    shake(block)
    wide = FusedBlock(block)
    keep_B2R = keep(branches)[1] if dropping else None
    bias_KNN, weight_BND = torch.randn(4, 7, 7), torch.randn(4, 7, 32)
    tokens_BND = torch.randn(4, 7, 32)
    grads = []
    for module in (block, wide):
        x_BND = tokens_BND.clone().requires_grad_()
        out_BND = module(x_BND, bias_KNN=bias_KNN, keep_B2R=keep_B2R)
        grads += torch.autograd.grad((out_BND * weight_BND).sum(), x_BND)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-5)
    assert (grads[0] - weight_BND).abs().max() > 0.1  # more than the residual stream's own


@pytest.mark.parametrize("branches", BRANCHES)
def test_four_matrix_products_whatever_the_number_of_branches(branches: int) -> None:
    wide = FusedBlock(Block(32, heads=4, branches=branches))
    calls = []
    for module in wide.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, _, __: calls.append((module.in_features, module.out_features))
            )
    wide(torch.randn(2, 7, 32))
    wide_D = 32 * branches
    assert calls == [(32, 3 * wide_D), (wide_D, 32), (32, 4 * wide_D), (4 * wide_D, 32)]


def test_the_model_is_left_as_it_was_and_the_copy_is_for_inference() -> None:
    model = make_model(branches=2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wide = fused(model)
    assert not wide.training
    assert not any(parameter.requires_grad for parameter in wide.parameters())
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.zero_()
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_multipliers_of_another_number_of_branches_are_an_error() -> None:
    wide = FusedBlock(Block(32, heads=4, branches=2))
    with pytest.raises(AssertionError, match="one multiplier a branch"):
        wide(torch.randn(2, 7, 32), keep_B2R=torch.ones(2, 2, 1))


@pytest.mark.parametrize("dropping", [False, True])
def test_bf16_in_either_form_is_near_and_keeps_the_stream(dropping: bool) -> None:
    model = make_model(branches=2, positions="relative_shared")
    keep_LB2R = keep(2) if dropping else None
    with torch.no_grad():
        exact_BND = model(images(), keep_LB2R)
        with torch.autocast("cpu", torch.bfloat16):
            mixed_BND = fused(model)(images(), keep_LB2R)
            assert fused(model).intermediates(images(), [3])[0].dtype == torch.float32
        half = fused(model.bfloat16())
        assert {value.dtype for value in half.state_dict().values()} == {torch.bfloat16}
        pure_BND = half(images().bfloat16(), keep_LB2R)
    assert pure_BND.dtype == torch.bfloat16
    for near_BND in (mixed_BND, pure_BND):
        assert (near_BND - exact_BND).norm() / exact_BND.norm() < 0.02


def test_what_is_fused_is_neither_fused_again_nor_regrouped() -> None:
    stem = STEMS["linear"](width=32)
    fast = fused(ImageEncoder(stem, Encoder(width=32, heads=4, depth=2, grid=(2, 3))).eval())
    with pytest.raises(UserError, match="fused already"):
        fused(fast)
    with pytest.raises(UserError, match="regroup it first"):
        regroup(fast, branches=2)
