"""The masked image model: counts of the facts, where the mask acts, what reaches what."""

import pytest
import torch
from torch import nn

from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.mim import MaskedImageModel
from mimkit.models.sizes import SIZES
from mimkit.models.stems import STEMS

MASK = torch.tensor(
    [[True, False, False, True, False, False], [False, True, True, False, True, False]]
)
QUIET = [("linear", {}, True), ("hmlp", {"norm": "ln"}, True), ("hmlp", {"norm": "bn"}, False)]


def count(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


@pytest.mark.parametrize(("size", "expected"), [("B", 91_965_776), ("L", 311_534_016)])
def test_beits_pretraining_model_has_its_parameters(size: str, expected: int) -> None:
    width, heads, depth = SIZES[size]
    with torch.device("meta"):
        encoder = Encoder(
            width=width, heads=heads, depth=depth, grid=(14, 14), positions="relative_shared"
        )
        stem = STEMS["linear"](width=width)
        model = MaskedImageModel(stem=stem, encoder=encoder, prediction_dim=8192)
    assert count(model) == expected


@pytest.mark.parametrize(
    ("stem", "expected"),
    [
        ("linear", 86_567_656),
        ("linear_bn", 86_569_192),
        ("hmlp", 86_727_016),
        ("levit", 89_466_184),
    ],
)
def test_vit_b_has_its_parameters(stem: str, expected: int) -> None:
    width, heads, depth = SIZES["B"]
    with torch.device("meta"):
        encoder = Encoder(
            width=width,
            heads=heads,
            depth=depth,
            grid=(14, 14),
            layer_scale=None,
            qkv_bias="qkv",
        )
        model = ImageEncoder(STEMS[stem](width=width), encoder)
        assert count(model, nn.Linear(width, 1000)) == expected


@pytest.mark.parametrize("stem", STEMS.names())
@pytest.mark.parametrize("positions", ["absolute", "relative_shared", "relative", "none"])
def test_one_prediction_a_masked_patch_and_gradient_everywhere(
    make_model, stem: str, positions: str
) -> None:
    model = make_model(stem, positions=positions)
    predicted_MV = model(torch.rand(2, 3, 32, 48), MASK)
    assert predicted_MV.shape == (5, 50)
    predicted_MV.square().sum().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []


def test_predictions_come_sample_by_sample_and_row_by_row(make_model) -> None:
    model = make_model().eval()
    image_BCHW = torch.rand(2, 3, 32, 48)
    encoded_BND = model.encoder(
        torch.where(MASK[..., None], model.mask_token, model.stem(image_BCHW))
    )
    places = [(0, 0), (0, 3), (1, 1), (1, 2), (1, 4)]
    expected = torch.stack([model.head(encoded_BND[b, 1 + n]) for b, n in places])
    torch.testing.assert_close(model(image_BCHW, MASK), expected)


@pytest.mark.parametrize(("stem", "settings", "training"), QUIET)
def test_pixels_under_the_mask_reach_nothing(make_model, stem, settings, training) -> None:
    """Mask before the stem and after it agree exactly; predictions do not change either."""
    model = make_model(stem, stem_settings=settings).train(training)
    image_BCHW = torch.rand(2, 3, 32, 48)
    other_BCHW = torch.where(pixels(MASK), torch.rand(2, 3, 32, 48), image_BCHW)
    black_BCHW = image_BCHW.masked_fill(pixels(MASK), 0)
    before = model.stem(image_BCHW)
    assert not torch.equal(before[MASK], model.stem(other_BCHW)[MASK])
    assert torch.equal(before[~MASK], model.stem(other_BCHW)[~MASK])
    assert torch.equal(before[~MASK], model.stem(black_BCHW)[~MASK])
    assert torch.equal(model(image_BCHW, MASK), model(other_BCHW, MASK))


def test_batch_statistics_carry_masked_pixels_to_visible_tokens(make_model) -> None:
    stem = make_model("hmlp", stem_settings={"norm": "bn"}).stem.train()
    image_BCHW = torch.rand(2, 3, 32, 48)
    black_BCHW = image_BCHW.masked_fill(pixels(MASK), 0)
    assert (stem(image_BCHW) - stem(black_BCHW))[~MASK].abs().max() > 0.05


def pixels(mask_BN: torch.Tensor) -> torch.Tensor:
    """mask_BN of a 2x3 grid -> the same on pixels, B1HW."""
    mask_B1HW = mask_BN.view(-1, 1, 2, 3)
    return mask_B1HW.repeat_interleave(16, 2).repeat_interleave(16, 3)


def test_the_image_encoder_shares_the_weights(make_model) -> None:
    model = make_model()
    encoder = model.image_encoder
    assert {id(p) for p in encoder.parameters()} < {id(p) for p in model.parameters()}
    assert encoder(torch.rand(2, 3, 32, 48)).shape == (2, 7, 32)
    assert set(dict(encoder.named_parameters())) < set(dict(model.named_parameters()))


def test_widths_must_agree() -> None:
    encoder = Encoder(width=32, heads=4, depth=1, grid=(2, 3))
    with pytest.raises(ValueError, match="the stem's width is 64, the encoder's 32"):
        MaskedImageModel(stem=STEMS["linear"](width=64), encoder=encoder, prediction_dim=5)
