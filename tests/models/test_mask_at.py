"""Where the mask acts: every stem, mask and placement; and what each placement promises."""

import numpy as np
import pytest
import torch

from mimkit.masks import MASKS
from mimkit.models.encoder import Encoder
from mimkit.models.init import initialise
from mimkit.models.mask_at import MASK_AT
from mimkit.models.mim import MaskedImageModel
from mimkit.models.stems import STEMS
from mimkit.random import Purpose, generator

GRID, SIDE = (4, 5), 16


def model(stem: str, mask_at: str, **settings) -> MaskedImageModel:
    made = MaskedImageModel(
        stem=STEMS[stem](width=32, **settings),
        encoder=Encoder(width=32, heads=4, depth=1, grid=GRID),
        prediction_dim=10,
        mask_at=MASK_AT[mask_at](),
    )
    initialise(made, seed=0)
    return made


def images(*, seed: int) -> torch.Tensor:
    shape = (2, 3, GRID[0] * SIDE, GRID[1] * SIDE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw(mask: str, *, num_masked: int = 6) -> torch.Tensor:
    rng = generator(Purpose.MASK, seed=0)
    drawn = MASKS[mask](grid=GRID, num_masked=num_masked)
    return torch.from_numpy(np.stack([drawn(rng) for _ in range(2)]))


def on_pixels(mask_BN: torch.Tensor) -> torch.Tensor:
    mask_B1rc = mask_BN.view(-1, 1, *GRID)
    return mask_B1rc.repeat_interleave(SIDE, 2).repeat_interleave(SIDE, 3)


@pytest.mark.parametrize("mask_at", MASK_AT.names())
@pytest.mark.parametrize("mask", MASKS.names())
@pytest.mark.parametrize("stem", STEMS.names())
def test_every_stem_mask_and_placement_takes_a_training_step(stem, mask, mask_at) -> None:
    made, mask_BN = model(stem, mask_at).train(), draw(mask)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    predicted_MV = made(images(seed=0), mask_BN)
    assert predicted_MV.shape == (int(mask_BN.sum()), 10)
    target_M = torch.arange(len(predicted_MV)) % 10
    torch.nn.functional.cross_entropy(predicted_MV, target_M).backward()
    optimizer.step()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.ndim == 1 or (parameter.grad != 0).any(), name
    assert not torch.equal(before["head.weight"], made.head.weight)


@pytest.mark.parametrize("mask_at", MASK_AT.names())
@pytest.mark.parametrize("stem", STEMS.names())
def test_masked_patches_hold_the_mask_token(stem: str, mask_at: str) -> None:
    made, mask_BN = model(stem, mask_at).eval(), draw("blockwise")
    token_11D = torch.rand(1, 1, 32)
    tokens_BND = made.mask_at.tokens(made.stem, images(seed=0), mask_BN, token_11D)
    hidden_BN = made.mask_at.hidden(mask_BN, stem=made.stem, grid=GRID)
    assert (hidden_BN | ~mask_BN).all(), "whatever is masked is hidden"
    assert (tokens_BND[hidden_BN] == token_11D).all()
    assert not (tokens_BND[~hidden_BN] == token_11D).all(-1).any()


@pytest.mark.parametrize("mask_at", ["before_stem", "dilated"])
@pytest.mark.parametrize("stem", STEMS.names())
@pytest.mark.parametrize("training", [True, False])
def test_what_is_under_the_mask_reaches_nothing(stem: str, mask_at: str, training: bool) -> None:
    """Bit for bit; batch statistics over all patches apart, which dilating does not mend."""
    settings = {"statistics": "visible"} if "statistics" in _settings(stem) else {}
    made, mask_BN = model(stem, mask_at, **settings).train(training), draw("blockwise")
    image_BCHW = images(seed=0)
    other_BCHW = torch.where(on_pixels(mask_BN), images(seed=1), image_BCHW)
    assert torch.equal(made(image_BCHW, mask_BN), made(other_BCHW, mask_BN))


def _settings(stem: str) -> dict:
    return STEMS[stem](width=32).settings


@pytest.mark.parametrize("stem", STEMS.names())
def test_dilated_hides_just_the_tokens_that_see_a_masked_pixel(stem: str) -> None:
    made, mask_BN = model(stem, "dilated").eval(), draw("random", num_masked=2)
    image_BCHW = images(seed=0)
    other_BCHW = torch.where(on_pixels(mask_BN), images(seed=1) * 100, image_BCHW)
    with torch.no_grad():
        moved_BN = (made.stem(image_BCHW) != made.stem(other_BCHW)).any(-1)
    assert torch.equal(made.mask_at.hidden(mask_BN, stem=made.stem, grid=GRID), moved_BN)


def test_before_and_after_agree_for_patchwise_stems_in_eval_mode() -> None:
    image_BCHW, mask_BN = images(seed=0), draw("blockwise")
    for stem in STEMS:
        if not STEMS[stem](width=32).patchwise:
            continue
        after, before, wide = (model(stem, mask_at).eval() for mask_at in
                               ("after_stem", "before_stem", "dilated"))  # fmt: skip
        assert torch.equal(after(image_BCHW, mask_BN), before(image_BCHW, mask_BN))
        assert torch.equal(after(image_BCHW, mask_BN), wide(image_BCHW, mask_BN))


@pytest.mark.parametrize("filler", ["zero", "mean"])
def test_fillers(filler: str) -> None:
    image_BCHW, mask_BN = images(seed=0) + 3, draw("blockwise")
    pixels_BCHW = MASK_AT["before_stem"](filler=filler).pixels(image_BCHW, mask_BN, grid=GRID)
    hidden_B1HW = on_pixels(mask_BN)
    assert torch.equal(
        pixels_BCHW.masked_fill(hidden_B1HW, 7), image_BCHW.masked_fill(hidden_B1HW, 7)
    )
    for image_CHW, filled_CHW, hidden_1HW in zip(image_BCHW, pixels_BCHW, hidden_B1HW, strict=True):
        visible_CR, under_CR = image_CHW[:, ~hidden_1HW[0]], filled_CHW[:, hidden_1HW[0]]
        expected_C = torch.zeros(3) if filler == "zero" else visible_CR.mean(1)
        torch.testing.assert_close(under_CR, expected_C[:, None].expand_as(under_CR))
