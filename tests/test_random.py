"""Randomness is a pure function of its key, and streams of different keys never meet."""

from itertools import combinations

import numpy as np
import pytest
import torch

from mimkit.random import Purpose, Rng, generator, torch_generator

WORDS = 10_000
# (seed 7, epoch 3, sample 11): the first two words, and a draw of torch below 2**31. Frozen: who
# repeats an old run needs the same numbers.
GOLDEN = {
    Purpose.ORDER: (9444998865358193343, 14651092177439291779, 1888514579),
    Purpose.VIEW: (13752072798941577749, 2115669360856068897, 2017709187),
    Purpose.MASK: (5853360034293691415, 13567812562859557061, 142604055),
    Purpose.DROP_PATH: (6400053852113717975, 7259844933562581050, 1965845398),
    Purpose.INIT: (10397390194470234029, 15129801664671359831, 1472799461),
    Purpose.GUMBEL: (6339378078572232542, 10766230001179246685, 918176172),
    Purpose.EMBEDDED_CROPS: (5374377564035141633, 5850040398373833991, 1704047413),
    Purpose.PICTURE: (7793374979887800372, 3223939444781379559, 455195481),
    Purpose.CODEBOOK: (4073142220958517052, 835306498582655976, 305598001),
    Purpose.MIX: (6162866188379828470, 5880615264820903986, 2073713639),
    Purpose.ERASE: (13325159961364758743, 16391135884881921397, 1702991492),
    Purpose.PROBE: (13032392172790307720, 2987965447923579490, 1626962315),
    Purpose.RESAMPLING: (7936682083941634834, 10851485823838889801, 56893311),
}


def _words(rng: Rng, count: int = WORDS) -> np.ndarray:
    return rng.bit_generator.random_raw(count)


@pytest.mark.parametrize("purpose", Purpose)
def test_the_numbers_of_every_purpose_are_the_ones_of_old(purpose: Purpose) -> None:
    key = {"seed": 7, "epoch": 3, "sample": 11}
    first, second, drawn = GOLDEN[purpose]
    assert _words(generator(purpose, **key), 2).tolist() == [first, second]
    draw = torch.randint(2**31, (1,), generator=torch_generator(purpose, **key))
    assert int(draw) == drawn


def test_the_numbers_of_the_purposes_are_all_different_and_none_is_zero() -> None:
    values = [int(purpose) for purpose in Purpose]
    assert len(set(values)) == len(values)
    assert min(values) > 0


@pytest.mark.parametrize("field", ["seed", "epoch", "sample"])
def test_neighbouring_streams_do_not_overlap(field: str) -> None:
    """Philox with the sample in the lowest word of its counter would be one stream, shifted."""
    streams = [_words(generator(Purpose.VIEW, **{"seed": 0, field: value})) for value in range(4)]
    for one, other in combinations(streams, 2):
        assert len(np.intersect1d(one, other)) == 0


def test_streams_of_different_purposes_do_not_overlap() -> None:
    streams = [_words(generator(purpose, seed=0)) for purpose in Purpose]
    assert len(np.unique(np.concatenate(streams))) == WORDS * len(streams)


def test_the_fields_of_a_key_are_not_interchangeable() -> None:
    keys = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)]
    starts = {
        tuple(_words(generator(Purpose.MASK, seed=s, epoch=e, sample=i), 4)) for s, e, i in keys
    }
    assert len(starts) == len(keys)


@pytest.mark.parametrize("key", [{"seed": 2**63 - 1}, {"seed": 0, "sample": 2**40},
                                 {"seed": 0, "epoch": 2**40}])  # fmt: skip
def test_large_keys_give_even_numbers(key: dict[str, int]) -> None:
    numbers = generator(Purpose.ORDER, **key).random(WORDS)
    assert numbers.mean() == pytest.approx(0.5, abs=0.015)  # five deviations
    assert numbers.std() == pytest.approx(12**-0.5, abs=0.008)


def test_uniform_over_samples_not_only_along_a_stream() -> None:
    """First numbers of many samples: what decides the crops of an epoch."""
    first = np.array([generator(Purpose.VIEW, seed=0, sample=i).random() for i in range(2000)])
    assert first.mean() == pytest.approx(0.5, abs=0.033)
    assert np.corrcoef(first[:-1], first[1:])[0, 1] == pytest.approx(0, abs=0.12)


def test_no_global_generator_is_touched() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    torch.rand(3, generator=torch_generator(Purpose.INIT, seed=0))
    generator(Purpose.INIT, seed=0).random(3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
