"""The learning rate is BEiT's, number by number."""

import pytest

from mimkit.train.schedule import cosine, warmup_cosine

# What unilm/beit/utils.py `cosine_scheduler` gives for base 1.5e-3, final 1e-5, 12 steps, 4 of them
# warm-up: numpy.linspace(0, base, 4), then half a cosine over the other 8 without its last point.
BEIT = [0.0, 0.0005, 0.001, 0.0015, 0.0015, 0.001443290252, 0.001281794552, 0.001040099157,
        0.000755, 0.0004699008429, 0.000228205448, 6.670974828e-05]  # fmt: skip
NO_WARMUP = [1.0, 0.9140576475, 0.6890576475, 0.4109423525, 0.1859423525]


def test_the_schedule_is_beits() -> None:
    ours = [warmup_cosine(k, steps=12, warmup=4, peak=1.5e-3, floor=1e-5) for k in range(12)]
    assert ours == pytest.approx(BEIT, rel=1e-9)


def test_without_warmup_it_starts_at_the_peak() -> None:
    ours = [warmup_cosine(k, steps=5, warmup=0, peak=1.0, floor=0.1) for k in range(5)]
    assert ours == pytest.approx(NO_WARMUP, rel=1e-9)


def test_after_the_last_step_it_stays_at_the_floor() -> None:
    for step in (12, 13, 1000):
        assert warmup_cosine(step, steps=12, warmup=4, peak=1.0, floor=0.25) == 0.25


@pytest.mark.parametrize("warmup", [0, 1, 2, 11, 12])
def test_every_length_of_warmup_stays_between_nothing_and_the_peak(warmup: int) -> None:
    rates = [warmup_cosine(k, steps=12, warmup=warmup, peak=1.0, floor=0.5) for k in range(12)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(-1, 2.0), (0, 2.0), (1 / 3, 1.75), (0.5, 1.5),
     (1, 1.0), (7, 1.0)],
)  # fmt: skip
def test_half_a_cosine(fraction: float, expected: float) -> None:
    assert cosine(fraction, 2.0, 1.0) == pytest.approx(expected)
