"""The ways in which a stem may be computed give what its plain layers give."""

import copy

import pytest
import torch
from einops import rearrange
from torch import nn

from mimkit.errors import UserError
from mimkit.models.norms import BatchNorm2d
from mimkit.models.stems import STEMS
from mimkit.models.stems._layers import LayeredStem

SHAPE = (3, 3, 32, 48)  # a grid of 2 x 3
MASK = torch.tensor([[1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1]]).bool()
KINDS = [
    (name, settings)
    for name in STEMS
    for settings in ({}, {"norm": "ln"}, {"norm": "none"}, {"gelu": True})
    if not settings or next(iter(settings)) in STEMS[name].__init__.__annotations__
]


def build(name: str, settings: dict, *, patch_size: int = 16) -> nn.Module:
    """With parameters and running statistics away from where they start."""
    try:
        stem = STEMS[name](width=32, patch_size=patch_size, **settings)
    except UserError:
        pytest.skip(f"{name} has no patches of {patch_size}")
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stem.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
        for norm in norms(stem):
            norm.running_mean.normal_(generator=draw)
            norm.running_var.uniform_(0.5, 2, generator=draw)
    return stem


def norms(stem: nn.Module) -> list[BatchNorm2d]:
    return [module for module in stem.modules() if isinstance(module, BatchNorm2d)]


def plainly(stem: LayeredStem, image_BCHW: torch.Tensor) -> torch.Tensor:
    """Convolutions on maps, as the stem is published."""
    for layer in stem.sequence:
        image_BCHW = layer(image_BCHW)
    return rearrange(image_BCHW, "b d h w -> b (h w) d")


def values_and_gradients(stem: nn.Module, forward, weights_BND: torch.Tensor, shape=SHAPE):
    image_BCHW = torch.rand(shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    tokens_BND = forward(image_BCHW)
    (tokens_BND.sin() * weights_BND).sum().backward()
    return [tokens_BND.detach(), image_BCHW.grad, *(p.grad for p in stem.parameters()),
            *(b.clone() for b in stem.buffers())]  # fmt: skip


def assert_equal_to_1e_5(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """1e-5 of the largest number of tokens, of pixel gradients and of weight gradients, or of 1.

    Weights share a scale: the gradient of a bias in front of a batch norm is 0, what is left of
    sums as large as the other weights' gradients.
    """
    for group in (slice(0, 1), slice(1, 2), slice(2, None)):
        scale = max([1.0, *(float(plain.detach().abs().max()) for plain in expected[group])])
        for ours, plain in zip(got[group], expected[group], strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize(("name", "settings"), KINDS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("patch_size", [4, 8, 14, 16, 32])
def test_rows_equal_convolutions(name: str, settings, training: bool, patch_size: int) -> None:
    stem = build(name, settings, patch_size=patch_size).train(training)
    if not isinstance(stem, LayeredStem):
        pytest.skip(f"{name} is no list of layers")
    twin, shape = copy.deepcopy(stem), (3, 3, 2 * patch_size, 3 * patch_size)
    weights_BND = torch.rand(3, 6, 32)
    got = values_and_gradients(stem, stem, weights_BND, shape)
    expected = values_and_gradients(twin, lambda image: plainly(twin, image), weights_BND, shape)
    assert_equal_to_1e_5(got, expected)


@pytest.mark.parametrize(("name", "settings"), KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_a_mask_changes_no_visible_token_and_no_gradient(name, settings, training) -> None:
    """Left out patches, where they may be left out, equal computed ones that nobody uses."""
    stem = build(name, settings).train(training)
    twin = copy.deepcopy(stem)
    weights_BND = torch.rand(3, 6, 32) * ~MASK[..., None]
    got = values_and_gradients(stem, lambda image: stem(image, MASK), weights_BND)
    expected = values_and_gradients(twin, twin, weights_BND)
    got[0], expected[0] = got[0][~MASK], expected[0][~MASK]
    assert_equal_to_1e_5(got, expected)


@pytest.mark.parametrize("name", STEMS.names())
def test_what_lies_under_the_mask_is_finite(name: str) -> None:
    assert build(name, {})(torch.rand(SHAPE), MASK).isfinite().all()


WITH_STATISTICS = [name for name in STEMS if "statistics" in STEMS[name].__init__.__annotations__]


@pytest.mark.parametrize("name", WITH_STATISTICS)
def test_visible_statistics_are_those_of_the_places_outside_the_mask(name: str) -> None:
    """Of the first norm: by hand from the convolution's map; then running statistics too."""
    stem = build(name, {"statistics": "visible"}).train()
    convolution, norm = stem.layers[0], norms(stem)[0]
    seen = []
    norm.register_forward_hook(lambda module, given, output: seen.append(output))
    before = norm.running_mean.clone()
    image_BCHW = torch.rand(SHAPE)
    stem(image_BCHW, MASK)
    features_BCrc = convolution(image_BCHW)
    times = features_BCrc.shape[-1] // 3
    visible = (~MASK).view(3, 2, 3).repeat_interleave(times, 1).repeat_interleave(times, 2)
    rows_RC = features_BCrc.permute(0, 2, 3, 1)[visible]
    mean_C, var_C = rows_RC.mean(0), rows_RC.var(0, unbiased=False)
    torch.testing.assert_close(norm.running_mean, before * 0.9 + mean_C * 0.1)
    normed_RC = (rows_RC - mean_C) / (var_C + norm.eps).sqrt() * norm.weight + norm.bias
    got = seen[0]
    if got.ndim == 4:
        got = got.permute(0, 2, 3, 1)[visible]
        torch.testing.assert_close(got, normed_RC, rtol=1e-4, atol=1e-5)
    else:  # rows: the same, patch by patch in another order
        torch.testing.assert_close(got.sum(0), normed_RC.sum(0), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(got.sort(0)[0], normed_RC.sort(0)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WITH_STATISTICS)
def test_frozen_statistics_never_change_and_train_as_eval(name: str) -> None:
    stem = build(name, {"statistics": "frozen"}).train()
    before = [buffer.clone() for buffer in stem.buffers()]
    image_BCHW = torch.rand(SHAPE)
    tokens_BND = stem(image_BCHW, MASK)
    tokens_BND.square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, stem.buffers(), strict=True))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in stem.parameters())
    with torch.no_grad():
        torch.testing.assert_close(stem.eval()(image_BCHW)[~MASK], tokens_BND[~MASK])


@pytest.mark.parametrize(("name", "settings"), KINDS)
@pytest.mark.parametrize("statistics", ["all", "frozen"])
def test_a_folded_stem_gives_the_same_tokens(name: str, settings, statistics: str) -> None:
    stem = build(name, settings).eval()
    for norm in norms(stem):
        norm.statistics = statistics
    if not norms(stem):
        with pytest.raises(UserError, match=f"'{name}' has no batch norm"):
            stem.folded()
        return
    folded = stem.folded()
    assert not norms(folded)
    image_BCHW = torch.rand(SHAPE)
    assert_equal_to_1e_5([folded(image_BCHW)], [stem(image_BCHW)])
    assert norms(stem), "the stem itself is left as it was"
    again = STEMS[folded.name](**folded.settings)
    again.load_state_dict(folded.state_dict())
    assert torch.equal(again.eval()(image_BCHW), folded(image_BCHW))


def test_a_folded_stem_keeps_device_and_dtype_and_draws_nothing() -> None:
    stem = build("hmlp", {}).double().eval()
    before = torch.get_rng_state()
    folded = stem.folded()
    assert torch.equal(torch.get_rng_state(), before)
    image_BCHW = torch.rand(SHAPE, dtype=torch.float64)
    assert folded(image_BCHW).dtype == torch.float64
    torch.testing.assert_close(folded(image_BCHW), stem(image_BCHW), rtol=0, atol=1e-6)
    assert not any(parameter.requires_grad for parameter in folded.parameters())


@pytest.mark.parametrize("name", STEMS.names())
@pytest.mark.parametrize("num_visible", [0, 1])
def test_one_visible_patch_and_none_are_no_trouble(name: str, num_visible: int) -> None:
    """A dilated mask may leave none; one is too few for torch's own batch norm."""
    settings = {"statistics": "visible"} if name in WITH_STATISTICS else {}
    stem = build(name, settings).train()
    mask_BN = torch.ones(1, 6, dtype=torch.bool)
    mask_BN[0, :num_visible] = False
    tokens_BND = stem(torch.rand(1, 3, 32, 48), mask_BN)
    tokens_BND.sum().backward()
    assert tokens_BND.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in stem.parameters())
