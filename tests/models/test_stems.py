"""What every stem promises, found through the registry; and the paper's numbers."""

import pytest
import torch

from mimkit.errors import UserError
from mimkit.models.stems import STEMS
from mimkit.models.stems._reach import reach_of

SIZES = (4, 8, 14, 16, 32)


def make(name: str, *, width: int = 32, patch_size: int = 16):
    torch.manual_seed(0)
    try:
        return STEMS[name](width=width, patch_size=patch_size).eval()
    except UserError as error:
        assert patch_size != 16 and "encoder.patch_size" in str(error)
        pytest.skip(f"{name} has no patches of {patch_size}, and says so")


def moved_tokens(stem, *, patch: tuple[int, int], image: tuple[int, int], corner: tuple[int, int]):
    """Grid of bools: tokens that change when one pixel, at `corner` of `patch`, changes."""
    image_BCHW = torch.rand(1, 3, *image, generator=torch.Generator().manual_seed(1))
    changed_BCHW = image_BCHW.clone()
    row, column = (p * stem.patch_size + c for p, c in zip(patch, corner, strict=True))
    changed_BCHW[..., row, column] += 100
    with torch.no_grad():
        moved_N = (stem(image_BCHW) != stem(changed_BCHW)).any(-1)[0]
    return moved_N.view(stem.grid(*image))


@pytest.mark.parametrize("name", STEMS.names())
@pytest.mark.parametrize("size", SIZES)
def test_a_stem_gives_one_token_a_patch(name: str, size: int) -> None:
    stem = make(name, patch_size=size)
    height, width = 2 * size, 3 * size  # not square, on purpose
    assert stem.grid(height, width) == (2, 3)
    assert stem(torch.rand(2, 3, height, width)).shape == (2, 6, 32)


@pytest.mark.parametrize("name", STEMS.names())
def test_tokens_are_numbered_row_by_row(name: str) -> None:
    stem = make(name)
    moved = moved_tokens(stem, patch=(1, 2), image=(32, 64), corner=(8, 8))
    assert moved[1, 2]
    if stem.patchwise:
        assert moved.sum() == 1


@pytest.mark.parametrize("name", STEMS.names())
@pytest.mark.parametrize("size", SIZES)
def test_the_declared_reach_is_the_measured_one(name: str, size: int) -> None:
    """The farthest pixel, in whole patches' distance and pixel by pixel, that moves a token."""
    stem = make(name, patch_size=size)
    side, token = 5 * size, 12  # the middle of 5x5
    image_BCHW = torch.rand(1, 3, side, side, requires_grad=True)
    stem(image_BCHW)[0, token].square().sum().backward()
    seen = image_BCHW.grad.abs().sum((0, 1)).nonzero()
    sides = 2 * size - int(seen.min()), int(seen.max()) - (3 * size - 1)
    assert sides == stem.reach_sides
    assert stem.reach == max(sides)
    assert stem.patchwise == (max(sides) == 0)


@pytest.mark.parametrize("name", STEMS.names())
def test_gradient_reaches_every_parameter(name: str) -> None:
    stem = make(name).train()
    torch.manual_seed(0)
    (stem(torch.rand(2, 3, 32, 48)) * torch.rand(2, 6, 32)).square().sum().backward()
    for parameter in stem.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", STEMS.names())
def test_settings_build_the_stem_again(name: str) -> None:
    stem = make(name)
    again = STEMS[name](**stem.settings)
    again.load_state_dict(stem.state_dict())
    image_BCHW = torch.rand(2, 3, 32, 48)
    assert torch.equal(again.eval()(image_BCHW), stem(image_BCHW))


@pytest.mark.parametrize("name", STEMS.names())
def test_an_image_that_does_not_divide_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"data\.image_size"):
        make(name)(torch.rand(1, 3, 32, 40))


@pytest.mark.parametrize("name", STEMS.names())
def test_bf16_autocast_gives_finite_tokens(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        tokens_BND = make(name).train()(torch.rand(2, 3, 32, 48))
    assert tokens_BND.isfinite().all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", [147_648, 295_296, 590_592, 787_456]),
        ("hmlp", [49_248, 190_656, 749_952, 1_327_616]),
    ],
)
def test_parameters_as_in_the_facts(name: str, expected: list[int]) -> None:
    with torch.device("meta"):
        stems = [STEMS[name](width=width) for width in (192, 384, 768, 1024)]
    assert [sum(p.numel() for p in stem.parameters()) for stem in stems] == expected


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("linear_bn", {"width": 768}, 592_128),
        ("levit", {"width": 384}, 873_648),
        ("levit", {"width": 768}, 3_489_120),
        ("levit", {"width": 768, "norm": "ln"}, 3_489_120),
        ("conv", {"width": 192, "plan": "1gf"}, 256_152),
        ("conv", {"width": 384, "plan": "4gf"}, 1_021_488),
        ("conv", {"width": 768, "plan": "18gf"}, 2_683_968),
        ("local", {"width": 768}, 1_053_888),
    ],
)
def test_parameters_of_the_other_stems(name: str, settings: dict, expected: int) -> None:
    with torch.device("meta"):
        stem = STEMS[name](**settings)
    assert sum(p.numel() for p in stem.parameters()) == expected


@pytest.mark.parametrize(
    ("name", "reach", "patchwise"),
    [("linear_bn", 0, True), ("levit", 15, False), ("conv", 15, False), ("local", 3, False)],
)
def test_which_stems_overlap(name: str, reach: int, patchwise: bool) -> None:
    stem = STEMS[name](width=32)
    assert (stem.reach, stem.patchwise) == (reach, patchwise)


def test_levit_is_built_as_published() -> None:
    """Four halvings, D/8 to D, no bias, activations after the first three only."""
    for name, kind in (("gelu", "GELU"), ("hardswish", "Hardswish")):
        layers = list(STEMS["levit"](width=64, activation=name).layers)
        kinds = [type(layer).__name__ for layer in layers]
        assert kinds == ["Conv2d", "BatchNorm2d", kind] * 3 + ["Conv2d", "BatchNorm2d"]
        convolutions = [layer for layer in layers if isinstance(layer, torch.nn.Conv2d)]
        assert [c.out_channels for c in convolutions] == [8, 16, 32, 64]
        assert all(c.bias is None and c.stride == (2, 2) for c in convolutions)


@pytest.mark.parametrize("name", ["linear", "linear_bn"])
def test_gelu_is_the_last_layer_of_a_linear_stem(name: str) -> None:
    image_BCHW = torch.rand(2, 3, 32, 48)
    plain, bent = STEMS[name](width=32), STEMS[name](width=32, gelu=True)
    bent.load_state_dict(plain.state_dict())
    expected = torch.nn.functional.gelu(plain.eval()(image_BCHW))
    torch.testing.assert_close(bent.eval()(image_BCHW), expected)


@pytest.mark.parametrize("norm", ["bn", "ln"])
@pytest.mark.parametrize("size", SIZES)
def test_hmlp_ends_with_a_norm_and_no_activation(norm: str, size: int) -> None:
    layers = list(STEMS["hmlp"](width=32, patch_size=size, norm=norm).layers)
    kinds = [type(layer).__name__ for layer in layers]
    norm_name = {"bn": "BatchNorm2d", "ln": "ChannelLayerNorm"}[norm]
    convolution = "PatchConv2d"
    assert kinds == [convolution, norm_name, "GELU"] * (len(kinds) // 3) + [convolution, norm_name]
    assert len(kinds) >= 5


def test_hmlp_at_16_is_the_published_one() -> None:
    convolutions = [m for m in STEMS["hmlp"](width=64).layers if isinstance(m, torch.nn.Conv2d)]
    published = [(3, 16, 4), (16, 16, 2), (16, 64, 2)]
    assert [(c.in_channels, c.out_channels, c.kernel_size[0]) for c in convolutions] == published
    assert all(c.stride == c.kernel_size and c.bias is not None for c in convolutions)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_size": 12}, "4, 8, 14, 16, 32"),
        ({"width": 30}, "multiple of 4"),
        ({"norm": "ln", "statistics": "visible"}, "set stem.norm=bn"),
        ({"norm": "none", "statistics": "frozen"}, "set stem.norm=bn"),
    ],
)
def test_hmlp_refuses_what_it_cannot_be(settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        STEMS["hmlp"](**{"width": 32, **settings})


def test_reach_of_overlapping_convolutions() -> None:
    levit = [torch.nn.Conv2d(3, 3, 3, 2, 1) for _ in range(4)]
    assert reach_of(levit) == (15, 0)  # 1 + 2 + 4 + 8 pixels up and left
    assert reach_of([torch.nn.Conv2d(3, 3, 7, 4, 3), torch.nn.Conv2d(3, 3, 4, 4)]) == (3, 0)
    with pytest.raises(TypeError, match="MaxPool2d"):
        reach_of([torch.nn.MaxPool2d(2)])
