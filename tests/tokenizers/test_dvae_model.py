"""dvae's network: dall_e's numbers, and the tokenizer that wraps it."""

from pathlib import Path

import pytest
import torch
from dall_e import Encoder, map_pixels
from torch import Tensor

from mimkit.errors import UserError
from mimkit.random import Purpose, torch_generator
from mimkit.tokenizers import TOKENIZERS
from mimkit.tokenizers._dvae_file import save_dvae
from mimkit.tokenizers._dvae_model import Dvae, make_dvae
from mimkit.tokenizers.dvae import DvaeTokenizer


def small_dvae(*, seed: int = 0, vocabulary: int = 64) -> Dvae:
    return make_dvae(
        width=16,
        blocks=1,
        vocabulary=vocabulary,
        generator=torch_generator(Purpose.INIT, seed=seed),
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, varied_dvae: Dvae) -> DvaeTokenizer:
    path = tmp_path_factory.mktemp("dvae") / "small.safetensors"
    save_dvae(path, varied_dvae, settings={}, half=False)
    made = TOKENIZERS["dvae"](path=str(path))
    assert isinstance(made, DvaeTokenizer)
    return made


def test_parameters_of_the_published_size() -> None:
    dvae = Dvae(width=256, blocks=2, vocabulary=8192, device="meta")
    assert sum(p.numel() for p in dvae.encoder.parameters()) == 53_786_240
    assert sum(p.numel() for p in dvae.decoder.parameters()) == 43_829_766


def test_initial_weights_depend_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = small_dvae()
    before = torch.random.get_rng_state()
    second, other = small_dvae(), small_dvae(seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    assert not torch.equal(first.encoder.blocks.input.w, other.encoder.blocks.input.w)
    assert first.encoder.blocks.input.w.std().item() == pytest.approx(1 / (3 * 49) ** 0.5, rel=0.1)


@pytest.mark.parametrize(
    "size", [{"width": 18}, {"width": 0}, {"blocks": 0}, {"vocabulary": 1}], ids=str
)
def test_impossible_sizes_are_refused(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        Dvae(**({"width": 16, "blocks": 1, "vocabulary": 64} | size))


def test_shapes_and_state(tokenizer: DvaeTokenizer) -> None:
    view_BChw = torch.rand(2, 3, 32, 48)
    target_BN = tokenizer.encode(view_BChw)
    assert tokenizer.grid(32, 48) == (4, 6)
    assert (target_BN.shape, target_BN.dtype) == ((2, 24), torch.int64)
    image_BChw = tokenizer.decode(target_BN, (4, 6))
    assert image_BChw.shape == view_BChw.shape
    assert image_BChw.min() >= 0 and image_BChw.max() <= 1
    assert tokenizer.can_decode
    assert tokenizer.prediction_dim == tokenizer.vocabulary == 64
    assert not any(parameter.requires_grad for parameter in tokenizer.parameters())
    assert not any(module.training for module in tokenizer.train().modules())


def test_words_are_those_of_plain_dall_e(tokenizer: DvaeTokenizer, photos: Tensor) -> None:
    encoder = Encoder(n_hid=16, n_blk_per_group=1, vocab_size=64)
    encoder.load_state_dict(tokenizer.dvae.encoder.state_dict())
    with torch.no_grad():
        logits_BVyx = encoder(map_pixels(photos))
    top_BN2 = logits_BVyx.flatten(2).transpose(1, 2).topk(2)
    clear_BN = top_BN2.values[..., 0] - top_BN2.values[..., 1] > 1e-4  # beyond rounding
    assert clear_BN.float().mean() > 0.99
    target_BN = tokenizer.encode(photos)
    assert torch.equal(target_BN[clear_BN], top_BN2.indices[..., 0][clear_BN])


def test_decode_is_the_published_use_of_the_decoder(tokenizer: DvaeTokenizer) -> None:
    target_BN = torch.arange(24).view(2, 12)
    one_hot = torch.nn.functional.one_hot(target_BN.view(2, 3, 4), 64).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        statistics = tokenizer.dvae.decoder(one_hot)
    expected = ((torch.sigmoid(statistics[:, :3]) - 0.1) / 0.8).clamp(0, 1)
    torch.testing.assert_close(tokenizer.decode(target_BN, (3, 4)), expected)


def test_patches_are_numbered_row_by_row(tokenizer: DvaeTokenizer) -> None:
    """Noise in the right half of the top row of a 4 x 16 grid changes words there, none afar."""
    view_BChw = torch.full((8, 3, 32, 128), 0.5)
    before_BN = tokenizer.encode(view_BChw)
    draw = torch.Generator().manual_seed(0)
    view_BChw[:, :, :8, 64:] = torch.rand(8, 3, 8, 64, generator=draw)
    moved_N = (tokenizer.encode(view_BChw) != before_BN).any(0)
    assert moved_N[8:16].sum() >= 4
    # dall_e's convolutions see further than a patch, but not four patches to the left.
    assert not moved_N.view(4, 16)[:, :4].any()


def test_autocast_does_not_reach_the_words(tokenizer: DvaeTokenizer, photos: Tensor) -> None:
    expected_BN = tokenizer.encode(photos)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tokenizer.encode(photos), expected_BN)


def test_loss_is_the_mean_cross_entropy_in_fp32(tokenizer: DvaeTokenizer) -> None:
    predicted_MV = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    target_M = torch.arange(5)
    expected = -predicted_MV.log_softmax(1)[torch.arange(5), target_M].mean()
    torch.testing.assert_close(tokenizer.loss(predicted_MV, target_M), expected)
    assert tokenizer.loss(predicted_MV.bfloat16(), target_M).dtype == torch.float32


@pytest.mark.parametrize(("height", "width"), [(33, 32), (32, 20), (0, 8), (4, 4)])
def test_a_view_of_broken_patches_is_refused(
    tokenizer: DvaeTokenizer, height: int, width: int
) -> None:
    with pytest.raises(UserError, match=r"data\.token_size"):
        tokenizer.grid(height, width)


def test_fingerprint_follows_weights_not_history(tmp_path: Path) -> None:
    def fingerprint(dvae: Dvae, **settings: object) -> str:
        save_dvae(tmp_path / "it.safetensors", dvae, settings=settings, half=False)
        return TOKENIZERS["dvae"](path=str(tmp_path / "it.safetensors")).fingerprint

    assert fingerprint(small_dvae()) == fingerprint(small_dvae(), steps=3)
    assert fingerprint(small_dvae()) != fingerprint(small_dvae(seed=1))
    assert len(fingerprint(small_dvae())) == 64
