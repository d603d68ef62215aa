"""What every mask promises, and the numbers of the blockwise ones."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimkit.errors import UserError
from mimkit.masks import MASKS
from mimkit.masks._blocks import BlockMask
from mimkit.random import Purpose, generator

exact_masks = [name for name in MASKS if MASKS[name](grid=(14, 14), num_masked=75).exact]
block_masks = [name for name in MASKS if issubclass(MASKS[name], BlockMask)]


def draw(mask, count: int, seed: int = 0) -> np.ndarray:
    rng = generator(Purpose.MASK, seed=seed)
    return np.stack([mask(rng) for _ in range(count)])


@pytest.mark.parametrize("name", MASKS.names())
def test_a_mask_is_bool_of_one_place_a_patch_and_a_function_of_its_generator(name: str) -> None:
    mask = MASKS[name](grid=(6, 9), num_masked=20)
    first, again = draw(mask, 5), draw(mask, 5)
    assert first.shape == (5, 54)
    assert first.dtype == np.bool_
    assert (first == again).all()
    assert not (first[0] == first[1]).all()


@pytest.mark.parametrize("name", exact_masks)
@given(
    grid=st.tuples(st.integers(2, 32), st.integers(2, 32)),
    ratio=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_exact_masks_are_exact_on_every_grid(name, grid, ratio, seed) -> None:
    total = grid[0] * grid[1]
    wanted = min(total - 1, max(1, round(ratio * total)))
    mask = MASKS[name](grid=grid, num_masked=wanted)
    assert (draw(mask, 3, seed).sum(1) == wanted).all()


@pytest.mark.parametrize("name", exact_masks)
@pytest.mark.parametrize("grid", [(2, 2), (3, 4), (5, 2)])
def test_every_feasible_count_of_small_grids(name: str, grid) -> None:
    for wanted in range(1, grid[0] * grid[1]):
        assert (draw(MASKS[name](grid=grid, num_masked=wanted), 20).sum(1) == wanted).all()


@pytest.mark.parametrize("name", MASKS.names())
@pytest.mark.parametrize("wanted", [-1, 0, 36, 99])
def test_infeasible_counts_are_refused_with_the_range(name: str, wanted: int) -> None:
    with pytest.raises(UserError, match=r"mask\.num_masked.*1\.\.35"):
        MASKS[name](grid=(6, 6), num_masked=wanted)


@pytest.mark.parametrize("name", MASKS.names())
@pytest.mark.parametrize(("grid", "wanted"), [((14, 14), 75), ((6, 6), 14), ((4, 7), 20)])
def test_every_cell_is_masked_sometimes_and_flips_are_alike(name: str, grid, wanted) -> None:
    masks = draw(MASKS[name](grid=grid, num_masked=wanted), 4000).reshape(-1, *grid)
    assert masks.mean(0).min() > 0.005
    for axes in ((1,), (2,), (1, 2)):
        half_a, half_b = masks[::2].sum(0), np.flip(masks[1::2], axes).sum(0)
        spread = (half_a + half_b) * (1 - (half_a + half_b) / len(masks))
        chi_square = ((half_a - half_b) ** 2 / spread).sum()
        # Cells of one mask go together, so the sum spreads more than for independent cells, where
        # its mean is N: up to 2.2 N over 12 seeds. Positions without the last row and column (an
        # exclusive bound) give 77 N and more.
        assert chi_square < 4 * grid[0] * grid[1]


@pytest.mark.parametrize("name", MASKS.names())
def test_a_mask_is_quick(name: str) -> None:
    mask, rng = MASKS[name](grid=(14, 14), num_masked=75), generator(Purpose.MASK, seed=0)
    rounds = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(100):
            mask(rng)
        rounds.append((time.process_time() - start) / 100)
    assert min(rounds) < 200e-6  # 7 to 40 us measured, on one core of a shared machine


def test_blockwise_has_beits_marginal() -> None:
    marginal = draw(MASKS["blockwise"](grid=(14, 14), num_masked=75), 6000).mean(0).reshape(14, 14)
    assert marginal[6:8, 6:8].mean() == pytest.approx(0.72, abs=0.02)
    assert marginal[[0, 0, -1, -1], [0, -1, 0, -1]].mean() == pytest.approx(0.042, abs=0.008)


@pytest.mark.parametrize(("grid", "wanted"), [((14, 14), 75), ((4, 7), 11), ((2, 2), 1)])
def test_the_wrapped_mask_prefers_no_patch(grid, wanted) -> None:
    masks = draw(MASKS["blockwise_wrapped"](grid=grid, num_masked=wanted), 6000)
    share = wanted / (grid[0] * grid[1])
    deviation = (share * (1 - share) / len(masks)) ** 0.5
    # 4.5 deviations on every patch: 196 of them go beyond once in 750 seeds. blockwise at 14x14 is
    # 50 deviations off in the middle.
    assert np.abs(masks.mean(0) - share).max() < 4.5 * deviation


@pytest.mark.parametrize(("grid", "settings"), [((14, 14), {"num_masked": 75}), ((5, 9), {
    "num_masked": 17, "min_block": 2, "max_block": 6, "aspect": 0.5})])  # fmt: skip
def test_the_wrapped_mask_is_the_blockwise_one_moved_on_the_torus(grid, settings) -> None:
    """Equal autocorrelation, draw by draw: every shape statistic of the torus is blockwise's."""
    here, wrapped = (MASKS[name](grid=grid, **settings)
                     for name in ("blockwise", "blockwise_wrapped"))  # fmt: skip
    moved = 0
    for seed in range(50):
        before, after = (draw(mask, 1, seed).reshape(grid) for mask in (here, wrapped))
        spectra = [np.abs(np.fft.fft2(mask)) for mask in (before, after)]
        np.testing.assert_allclose(*spectra, atol=1e-9)
        moved += not (before == after).all()
    assert moved > 40


def test_the_reference_has_beits_counts() -> None:
    counts = draw(MASKS["blockwise_reference"](grid=(14, 14), num_masked=75), 12000).sum(1)
    assert counts.mean() == pytest.approx(74.47, abs=0.06)
    assert (counts == 75).mean() == pytest.approx(0.666, abs=0.02)
    assert counts.min() <= 66
    assert counts.max() == 75


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_the_reference_is_never_empty(wanted: int) -> None:
    counts = draw(MASKS["blockwise_reference"](grid=(2, 2), num_masked=wanted), 500).sum(1)
    assert counts.min() >= 1


@pytest.mark.parametrize("name", block_masks)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_block": 16, "num_masked": 10}, r"mask\.min_block is 16.*1\.\.10"),
        ({"min_block": 0}, r"mask\.min_block is 0.*1\.\.14"),
        ({"min_block": 8, "max_block": 4}, r"mask\.min_block is 8.*1\.\.4"),
        ({"max_block": 0}, r"mask\.max_block is 0"),
        ({"aspect": 0.0}, r"mask\.aspect is 0\.0"),
    ],
)
def test_blocks_that_cannot_be_are_refused(name: str, settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        MASKS[name](**{"grid": (6, 6), "num_masked": 14, **settings})


def test_a_grid_without_room_for_the_only_block_is_refused_at_construction() -> None:
    with pytest.raises(UserError, match=r"set mask\.name to blockwise"):
        MASKS["blockwise_reference"](grid=(8, 8), num_masked=3, min_block=3, aspect=1.0)


def test_min_block_is_beits_at_75_and_scaled_below() -> None:
    def default(grid, num_masked):
        return MASKS["blockwise"](grid=grid, num_masked=num_masked).blocks.min_block

    assert [default((14, 14), count) for count in (1, 14, 75, 150)] == [1, 3, 16, 16]
    assert default((2, 32), 48) == 3  # the largest block of a grid two rows high
