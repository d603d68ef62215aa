"""Health of tokenizers whose words can be counted by hand, and of the embedded one fed wrongly."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import Shards
from torch import Tensor

from mimkit import build
from mimkit.audit._tokenizer_picture import tokenizer_picture
from mimkit.audit._tokenizer_views import agreement, agreement_around, relative_spread
from mimkit.audit.of_run import training_views
from mimkit.audit.tokenizer import TokenizerHealth, measure, reconstruction
from mimkit.audit.tokenizer_verdict import (
    dead,
    misplaced,
    numbers,
    poor,
    say,
    stop_if_dead,
    verdict,
)
from mimkit.batch import Batch, Grid
from mimkit.config import DataConfig
from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer

SIDE = 8  # pixels of a patch


class Middle(VisualTokenizer):
    """The word of a patch is the red of the pixel in its middle, 0..255."""

    prediction_dim = vocabulary = 256
    fingerprint = "the red of the middle"

    def grid(self, height: int, width: int) -> Grid:
        return height // SIDE, width // SIDE

    def encode(self, view_BChw: Tensor) -> Tensor:
        return (
            (view_BChw[:, 0, SIDE // 2 :: SIDE, SIDE // 2 :: SIDE] * 255).round().long().flatten(1)
        )

    def loss(self, predicted_MV: Tensor, target_M: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(predicted_MV, target_M)

    def decode(self, target_BN: Tensor, grid: Grid) -> Tensor:
        red_B1rc = target_BN.view(-1, 1, *grid) / 255
        return torch.nn.functional.interpolate(red_B1rc, scale_factor=SIDE).repeat(1, 3, 1, 1)


class ByColumns(Middle):
    """Its words stand column by column: patches and words are transposed to each other."""

    def encode(self, view_BChw: Tensor) -> Tensor:
        return super().encode(view_BChw.transpose(2, 3))


class Numbers(Middle):
    """Two numbers a patch: red and green of its middle, times a scale, plus an offset."""

    prediction_dim, vocabulary = 2, None

    def __init__(self, *, scale: float = 1.0, offset: float = 0.0) -> None:
        super().__init__()
        self.scale, self.offset = scale, offset

    def encode(self, view_BChw: Tensor) -> Tensor:
        middle_BCN = view_BChw[:, :2, SIDE // 2 :: SIDE, SIDE // 2 :: SIDE].flatten(2)
        return middle_BCN.transpose(1, 2) * self.scale + self.offset


def batch(token_view_BChw: Tensor, patch_view_BCHW: Tensor | None = None) -> Batch:
    """uint8; where the encoder's view is not given it is the token view, twice as large."""
    if patch_view_BCHW is None:
        patch_view_BCHW = token_view_BChw.repeat_interleave(2, 2).repeat_interleave(2, 3)
    none_B = torch.zeros(len(token_view_BChw))
    return Batch(patch_view_BCHW, token_view_BChw, torch.empty(0), none_B, none_B)


def plain_patches(*, images: int = 4, rows: int = 5, columns: int = 6) -> Tensor:
    """Grey patches of one brightness each, drawn at random."""
    draw = torch.Generator().manual_seed(0)
    grey_B1rc = torch.randint(256, (images, 1, rows, columns), generator=draw, dtype=torch.uint8)
    grey_BChw = grey_B1rc.repeat_interleave(SIDE, 2).repeat_interleave(SIDE, 3)
    return grey_BChw.expand(-1, 3, -1, -1).contiguous()


@pytest.fixture(scope="module")
def photographs(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> list[Batch]:
    data = DataConfig(image_size=96, token_size=48, cache_dir=str(tmp_path_factory.mktemp("cache")),
                      crop_scale=(0.5, 1.0))  # fmt: skip
    source = build.build_source(data, str(shards.train), split="train")
    return training_views(source, data, seed=0, images=24)


@pytest.fixture(scope="module")
def embedded() -> VisualTokenizer:
    return TOKENIZERS["dvae"](path="embedded")


@pytest.fixture(scope="module")
def healthy(embedded: VisualTokenizer, photographs: list[Batch]) -> TokenizerHealth:
    return measure(embedded, photographs, name="embedded")


def test_words_are_counted(healthy: TokenizerHealth) -> None:
    view_BChw = torch.zeros(2, 3, 4 * SIDE, 4 * SIDE, dtype=torch.uint8)
    view_BChw[0, :, : 2 * SIDE] = 7  # 8 of 32 patches
    view_BChw[1, :, :SIDE, :SIDE] = 9  # one
    words = measure(Middle(), [batch(view_BChw)], name="middle").words
    assert words is not None
    assert (words.num_tokens, words.vocabulary, words.codes_used) == (32, 256, 3)
    assert words.top_share == 23 / 32
    shares = (23 / 32, 8 / 32, 1 / 32)
    assert words.entropy == pytest.approx(-sum(p * math.log(p) for p in shares))


def test_a_shift_by_one_pixel_moves_every_word_of_a_ramp_and_none_of_plain_patches() -> None:
    ramp = torch.arange(6 * SIDE, dtype=torch.uint8).expand(2, 3, 5 * SIDE, -1)
    assert measure(Middle(), [batch(ramp)], name="middle").stable_shift == 0
    ramp = ramp.clone()
    ramp[0] = 9
    assert measure(Middle(), [batch(ramp)], name="middle").stable_shift == 0.5
    assert measure(Middle(), [batch(plain_patches())], name="middle").stable_shift == 1


def test_recompression_keeps_words_of_plain_patches_and_moves_those_of_noise() -> None:
    plain = measure(Middle(), [batch(plain_patches())], name="middle")
    assert plain.stable_jpeg90 > 0.9
    noise = torch.randint(256, (4, 3, 40, 48), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(0))  # fmt: skip
    noisy = measure(Middle(), [batch(noise)], name="middle")
    assert max(noisy.stable_jpeg75, noisy.stable_jpeg90) < 0.2


def test_both_views_agree_at_the_same_patch_and_nowhere_else() -> None:
    health = measure(Middle(), [batch(plain_patches(columns=12))], name="middle")
    assert health.same_crop is not None and health.moved_crop is not None
    assert health.same_crop.right == health.moved_crop.right == 1
    assert max(health.same_crop.wrong, health.moved_crop.wrong) < 0.1
    assert misplaced(health) is None


@pytest.mark.parametrize(("down", "right"), [(0, 1), (1, 0), (-1, -1)])
def test_a_shifted_token_view_moves_the_largest_agreement(down: int, right: int) -> None:
    """The word of the crop's patch is then found at the neighbour that it came from."""
    true = plain_patches(rows=8, columns=9)
    patch_view = true.repeat_interleave(2, 2).repeat_interleave(2, 3)
    shifted = true.roll((down * SIDE, right * SIDE), (2, 3))
    health = measure(Middle(), [batch(shifted, patch_view)], name="middle")
    assert health.same_crop is not None
    table = torch.tensor(health.same_crop.table)
    assert divmod(int(table.argmax()), 3) == (1 - down, 1 - right)
    assert health.same_crop.wrong == 1 and health.same_crop.right < 0.1
    reason = misplaced(health)
    assert reason is not None and "do not show the same crop" in reason
    assert verdict(health) == ("misplaced", reason)
    assert f"warning: tokenizer: {reason}" in say(health)


def test_a_shifted_token_view_of_photographs_is_found(
    embedded: VisualTokenizer, photographs: list[Batch], healthy: TokenizerHealth
) -> None:
    moved = [
        views._replace(token_view_BChw=views.token_view_BChw.roll(SIDE, 3)) for views in photographs
    ]
    found = measure(embedded, moved, name="embedded")
    assert healthy.same_crop is not None and found.same_crop is not None
    assert found.same_crop.table[1][0] == found.same_crop.wrong > 0.5
    assert found.same_crop.right < 0.5 < healthy.same_crop.right
    assert misplaced(found) is not None


def test_another_order_of_the_patches_is_found() -> None:
    """Both views agree with each other, but not with where their patches are."""
    health = measure(ByColumns(), [batch(plain_patches(rows=6, columns=6))], name="columns")
    assert health.same_crop is not None and health.same_crop.right > 0.9
    assert "do not stand row by row" in str(misplaced(health))


def test_a_grid_without_inner_patches_has_no_neighbours() -> None:
    health = measure(Middle(), [batch(plain_patches(rows=2, columns=6))], name="middle")
    assert health.same_crop is None and health.moved_crop is None
    assert misplaced(health) is None
    assert "neighbour" not in say(health)
    assert "tokenizer_agreement" not in numbers(health)


def test_agreement_around_by_hand() -> None:
    one = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8]])
    table = agreement_around(one, torch.tensor([[9, 9, 9, 4, 9, 9, 9, 9, 4]]), grid=(3, 3))
    assert table == ((0, 0, 0), (1, 0, 0), (0, 0, 1))


def test_agreement_of_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 64, 100, 3, generator=draw)
    assert agreement(one, one) == 1
    assert agreement(one, other) == pytest.approx(0, abs=0.03)
    assert agreement(one, one + other) == pytest.approx(1 - 1 / (1 + 2), abs=0.03)
    assert agreement(one, -one) == pytest.approx(-1, abs=0.01)
    assert agreement(torch.ones(2, 3, 4), torch.ones(2, 3, 4)) == 1


def test_the_embedded_tokenizer_is_healthy(healthy: TokenizerHealth) -> None:
    assert verdict(healthy) == ("healthy", None)
    assert healthy.words is not None and healthy.same_crop is not None
    assert healthy.words.codes_used > 100
    assert healthy.stable_jpeg75 < healthy.stable_jpeg90 < 1
    assert 0.3 < healthy.stable_shift < 0.8
    assert healthy.same_crop.right > 2 * healthy.same_crop.wrong
    stop_if_dead(healthy)


@pytest.mark.parametrize("scale", [1 / 255, 0.0])
def test_views_of_another_range_make_it_dead(
    embedded: VisualTokenizer, photographs: list[Batch], scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Divided by 255 twice: three words are left."""
    encode = embedded.encode
    monkeypatch.setattr(embedded, "encode", lambda view_BChw: encode(view_BChw * scale))
    health = measure(embedded, photographs, name="dvae")
    assert verdict(health)[0] == "dead"
    with pytest.raises(UserError) as caught:
        stop_if_dead(health)
    message = str(caught.value)
    assert "tokenizer 'dvae' gives nearly the same target everywhere: one word takes" in message
    assert f"of 864 patches of 24 views, and their entropy is {health.words.entropy:.2f}" in message
    assert "at most 90%" in message and "divided by 255 twice" in message
    assert "set tokenizer.name and tokenizer.path" in message


def test_the_limits_of_death(healthy: TokenizerHealth) -> None:
    assert healthy.words is not None
    cases = {
        (0.91, 3.0, 512): True,
        (0.9, 1.0, 512): False,
        (0.5, 0.99, 512): True,
        (0.5, math.log(2), 2): False,
        (0.89, 0.35, 4): False,
        (0.89, 0.34, 4): True,
    }
    for (share, entropy, vocabulary), is_dead in cases.items():
        words = replace(healthy.words, top_share=share, entropy=entropy, vocabulary=vocabulary)
        assert (dead(replace(healthy, words=words)) is not None) == is_dead


def test_few_words_are_poor_but_alive(healthy: TokenizerHealth) -> None:
    assert healthy.words is not None
    words = replace(healthy.words, perplexity=4.0, top_share=0.6)
    found = replace(healthy, words=words)
    assert verdict(found) == ("poor", poor(found))
    assert "the perplexity is 4.0 of 512; one word takes 60%" in str(poor(found))
    stop_if_dead(found)


def test_numbers_are_judged_by_their_spread() -> None:
    views = [batch(plain_patches())]
    health = measure(Numbers(scale=3), views, name="numbers")
    assert health.words is None and health.vocabulary is None
    assert verdict(health) == ("healthy", None)
    assert health.same_crop is not None and health.same_crop.right > 0.9 > health.same_crop.wrong
    assert numbers(health)["tokenizer_spread"] == health.spread
    assert "spread by" in say(health)
    assert reconstruction(Numbers(), views) is None
    for constant in (Numbers(scale=0, offset=1), Numbers(scale=0), Numbers(scale=1e-3, offset=1)):
        assert "differ by 0.0" in str(dead(measure(constant, views, name="numbers")))
    assert relative_spread(torch.tensor([[[1.0], [3.0]]])) == pytest.approx(1 / 5**0.5)


def test_targets_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UserError, match=r"100.0% of the numbers .* are not finite"):
        measure(Numbers(scale=math.nan), [batch(plain_patches())], name="numbers")


def test_reconstruction_over_batches() -> None:
    """Grey patches come back exactly; green that lacks red by 0.2 is a third of the pixels."""
    views = plain_patches()
    exact = reconstruction(Middle(), [batch(views[:1]), batch(views[1:])])
    assert exact is not None
    assert (exact.mae, exact.psnr) == (pytest.approx(0, abs=1e-7), pytest.approx(math.inf))
    assert exact.ssim == pytest.approx(1, abs=1e-5)
    dark = torch.zeros(2, 3, 24, 24, dtype=torch.uint8)
    dark[:, 1] = 51
    found = reconstruction(Middle(), [batch(dark)])
    assert found is not None
    assert found.mae == pytest.approx(0.2 / 3)
    assert found.psnr == pytest.approx(-10 * math.log10(0.04 / 3))


def test_the_views_are_those_of_the_first_updates(shards: Shards, tmp_path: Path) -> None:
    from mimkit.data.loader import train_loader

    data = DataConfig(image_size=32, token_size=16, cache_dir=str(tmp_path))
    source = build.build_source(data, str(shards.train), split="train")
    found = training_views(source, data, seed=3, images=21)
    assert [len(views.index_B) for views in found] == [16, 5]
    loader = train_loader(source=source, views=build.build_views(data), mask=None, seed=3,
                          batch_size=21, rank=0, world=1, position=0, window=data.window,
                          workers=0)  # fmt: skip
    first = next(iter(loader))
    for field in ("token_view_BChw", "patch_view_BCHW", "index_B"):
        together = torch.cat([getattr(views, field) for views in found])
        assert torch.equal(together, getattr(first, field))


def test_the_picture_gives_a_word_one_colour() -> None:
    views = plain_patches(images=2)
    views[0, :, :SIDE, :SIDE] = views[1, :, SIDE : 2 * SIDE, :SIDE] = 77
    views[1, :, :SIDE, :SIDE] = 78
    picture = tokenizer_picture(Middle(), views)
    tile = 3 * 48  # the width of 48 pixels is drawn at least 112 wide
    height = 3 * 40
    assert picture.size == (3 * (tile + 4), 14 + 2 * (height + 4))
    left, top = 2 * (tile + 4), 14
    same = picture.getpixel((left + 5, top + 5))
    assert picture.getpixel((left + 5, top + height + 4 + 3 * SIDE + 5)) == same
    assert picture.getpixel((left + 5, top + height + 4 + 5)) != same
    assert picture.getpixel((5, 20)) == picture.getpixel((tile + 4 + 5, 20)) == (77, 77, 77)


def test_the_picture_of_numbers_shows_where_they_differ() -> None:
    class Mute(Numbers):
        decode = VisualTokenizer.decode

    views = torch.zeros(1, 3, 24, 24, dtype=torch.uint8)
    views[:, :, :, 16:] = 200
    picture = tokenizer_picture(Mute(), views)
    tile = 5 * 24
    assert picture.size == (2 * (tile + 4), 14 + tile + 4)
    colours = [
        picture.getpixel((tile + 4 + x, 14 + tile // 2))[0] for x in (5, tile // 2, tile - 5)
    ]
    assert sorted({colours[0], colours[2]}) == [0, 255]
    assert colours[0] == colours[1]
