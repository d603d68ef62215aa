"""The certificate's numbers, on masks whose numbers are known."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from mimkit.audit.mask import MaskCertificate, certify, draw_masks, flip_symmetry
from mimkit.errors import UserError
from mimkit.masks import MASKS, Mask
from mimkit.random import Purpose, generator

BEIT = {"grid": (14, 14), "count": 75}
DRAWS = 4000


def make(name: str, grid: tuple[int, int], **settings) -> Callable[[int], Mask]:
    return lambda count: MASKS[name](grid=grid, num_masked=count, **settings)


@cache
def certificate(name: str) -> MaskCertificate:
    return certify(make(name, BEIT["grid"]), name=name, draws=DRAWS, **BEIT)


class Turns(Mask):
    """The same few pictures in turn, whatever the generator."""

    def __init__(self, *pictures: str) -> None:
        self.masks = [np.array([mark == "#" for mark in "".join(p.split())]) for p in pictures]
        self.calls = 0

    def __call__(self, rng) -> np.ndarray:
        self.calls += 1
        return self.masks[(self.calls - 1) % len(self.masks)]


def test_every_number_of_masks_that_were_counted_by_hand() -> None:
    mask = Turns("##.. ..#. ...#", "#... #... ....", ".... .##. ....", ".... .... ....")
    found = certify(lambda _: mask, name="turns", grid=(3, 4), count=2, draws=4)
    assert found.exact == 0.5
    assert (found.mean_count, found.least_count) == (2.0, 0)
    assert found.marginal == ((0.5, 0.25, 0, 0), (0.25, 0.25, 0.5, 0), (0, 0, 0, 0.25))
    assert (found.min_cell, found.max_cell) == (0.0, 0.5)
    assert found.corner == pytest.approx((0.5 + 0.25) / 4)
    assert found.edge == pytest.approx((0.5 + 0.25 + 0.25 + 0.25) / 10)
    assert found.centre == pytest.approx((0.25 + 0.5) / 2)  # one row, two columns
    assert found.blocks == (3 + 1 + 1 + 0) / 4  # patches that share a corner only are apart
    assert found.block_size == 8 / 5


def test_neighbouring_draws_are_not_one_block() -> None:
    mask = Turns("## ..", "## ..", "#. ..")
    found = certify(lambda _: mask, name="turns", grid=(2, 2), count=2, draws=3)
    assert (found.blocks, found.block_size) == (1.0, 5 / 3)


def test_blockwise_is_exact_and_prefers_the_centre() -> None:
    found = certificate("blockwise")
    assert (found.exact, found.mean_count, found.least_count) == (1.0, 75.0, 75)
    assert found.min_cell == pytest.approx(0.042, abs=0.012)
    assert found.max_cell == pytest.approx(0.720, abs=0.025)
    assert found.corner == pytest.approx(0.044, abs=0.01)
    assert found.edge == pytest.approx(0.142, abs=0.01)
    assert found.centre == pytest.approx(0.714, abs=0.02)
    assert found.blocks == pytest.approx(1.43, abs=0.06)
    assert found.block_size == pytest.approx(52.4, abs=2)


def test_the_reference_falls_short_in_a_third_of_the_draws() -> None:
    found = certificate("blockwise_reference")
    assert found.exact == pytest.approx(0.666, abs=0.03)  # four deviations
    assert found.mean_count == pytest.approx(74.47, abs=0.08)
    assert found.least_count < 70


@pytest.mark.parametrize("name", ["blockwise_wrapped", "random"])
def test_uniform_masks_are_uniform(name: str) -> None:
    found, share = certificate(name), 75 / 196
    deviation = (share * (1 - share) / DRAWS) ** 0.5
    assert found.exact == 1.0
    assert share - 4.5 * deviation < found.min_cell < share < found.max_cell
    assert found.max_cell < share + 4.5 * deviation
    assert found.centre == pytest.approx(found.corner, abs=0.05)
    assert np.mean(found.marginal) == pytest.approx(share, abs=1e-12)


def test_a_certificate_is_a_function_of_its_seed_apart_from_the_time() -> None:
    again = partial(certify, make("blockwise", (6, 9)), name="b", grid=(6, 9), count=20, draws=50)
    one, other, third = again(seed=1), again(seed=1), again(seed=2)
    assert replace(one, us_per_mask=0) == replace(other, us_per_mask=0)
    assert one.marginal != third.marginal
    assert 0.1 < one.us_per_mask < 1000


def test_the_draws_are_those_of_trainings_first_epoch() -> None:
    mask = MASKS["blockwise"](grid=(6, 9), num_masked=20)
    drawn = draw_masks(mask, range(3), grid=(6, 9), seed=5)
    rng = generator(Purpose.MASK, seed=5, epoch=0, sample=2)
    assert (drawn[2].reshape(-1) == mask(rng)).all()


@pytest.mark.parametrize(
    ("name", "settings", "feasible"),
    [("random", {}, (1, 35)), ("blockwise", {}, (1, 35)), ("blockwise", {"min_block": 5}, (5, 35)),
     ("blockwise_reference", {"min_block": 3, "aspect": 1.0}, (4, 35))],
)  # fmt: skip
def test_the_feasible_counts_are_those_that_can_be_made(name: str, settings, feasible) -> None:
    """A 3-patch block of equal sides would be 2 x 2: the reference cannot have just 3."""
    make_mask = make(name, (6, 6), **settings)
    found = certify(make_mask, name=name, grid=(6, 6), count=14, draws=10)
    assert (found.least_feasible, found.most_feasible) == feasible
    for count in (feasible[0] - 1, feasible[1] + 1):
        with pytest.raises(UserError):
            make_mask(count)


def test_a_count_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"mask\.num_masked is 36"):
        certify(make("random", (6, 6)), name="random", grid=(6, 6), count=36, draws=10)


def test_false_alarms_of_the_symmetry_test_are_as_rare_as_said() -> None:
    """Blocks in a grid of 4 x 5: patches of one mask go together, which the test must not mind.

    Two directions that were independent would give P(p <= a) = 1 - (1 - a / 2)^2.
    """
    mask = MASKS["blockwise"](grid=(4, 5), num_masked=8)
    p_values = []
    for seed in range(400):
        rng = generator(Purpose.MASK, seed=seed)
        mask_KHW = np.stack([mask(rng).reshape(4, 5) for _ in range(100)])
        p_values.append(flip_symmetry(mask_KHW, rng, permutations=199))
    for level in (0.05, 0.2, 0.5):
        expected = 1 - (1 - level / 2) ** 2
        spread = (expected * (1 - expected) / len(p_values)) ** 0.5
        assert np.mean(np.array(p_values) <= level) == pytest.approx(expected, abs=4 * spread)


@pytest.mark.parametrize("reach", [(3, 4), (4, 3), (3, 3)])
def test_positions_with_an_exclusive_bound_are_lopsided(reach: tuple[int, int]) -> None:
    """A 2 x 2 block in a grid of 6 x 6 has five places either way; the last one is forgotten."""
    rng = generator(Purpose.MASK, seed=0)
    mask_KHW = np.zeros((1000, 6, 6), np.bool_)
    for mask_HW in mask_KHW:
        top, left = rng.integers(0, np.array(reach) + 1)
        mask_HW[top : top + 2, left : left + 2] = True
    assert flip_symmetry(mask_KHW, rng) < 0.01


def test_a_block_that_may_go_everywhere_is_not() -> None:
    rng = generator(Purpose.MASK, seed=0)
    mask_KHW = np.zeros((1000, 6, 6), np.bool_)
    for mask_HW in mask_KHW:
        top, left = rng.integers(0, 5, 2)
        mask_HW[top : top + 2, left : left + 2] = True
    assert flip_symmetry(mask_KHW, rng) > 0.05


def test_many_draws_are_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four parts of seven and one of two. Two lopsided masks prove nothing, thirty do."""
    monkeypatch.setattr("mimkit.audit.mask._BLOCK", 7)
    mask_KHW = np.zeros((30, 3, 3), np.bool_)
    for first, expected in ((28, 1.0), (0, 2 / 100)):  # 28: equal signs in half the permutations
        mask_KHW[first:, 0, 1] = True
        p = flip_symmetry(mask_KHW, generator(Purpose.MASK, seed=0), permutations=99)
        assert p == pytest.approx(expected, abs=0.25 * expected)


def test_a_grid_of_one_row_has_nothing_to_mirror_up_and_down() -> None:
    found = certify(make("random", (1, 8)), name="random", grid=(1, 8), count=3, draws=500)
    assert 0.01 < found.symmetric <= 1
    assert found.edge == pytest.approx(3 / 8)
