"""The order is a permutation, a function of (seed, epoch), and no epoch is made before its turn."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimkit.data.order import Order, WeightedSet
from mimkit.data.sampler import Share, TrainSampler
from mimkit.errors import UserError


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    window=st.integers(1, 14),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 1000),
)
def test_every_epoch_has_every_sample_once(
    lengths: list[int], window: int, seed: int, epoch: int
) -> None:
    groups = np.cumsum([0, *lengths])
    order = Order(groups=groups, seed=seed, window=window)
    n = len(order)
    located = [order.locate(epoch * n + place) for place in range(n)]
    assert {(place.epoch, place.copy) for place in located} == {(epoch, 0)}
    assert sorted(place.sample for place in located) == list(range(n))
    # a window of samples comes from `window` shards only
    shards = np.searchsorted(groups, [place.sample for place in located], "right") - 1
    _, first_seen = np.unique(shards, return_index=True)
    in_order = shards[np.sort(first_seen)]
    assert set(shards[: sum(lengths[s] for s in in_order[:window])]) == set(in_order[:window])


def test_epochs_and_seeds_differ() -> None:
    groups = np.array([0, 50, 100])
    orders = [
        Order(groups=groups, seed=seed, window=2).epoch_order(epoch).tolist()
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == Order(groups=groups, seed=0, window=2).epoch_order(0).tolist()


def test_these_numbers_are_for_ever() -> None:
    order = Order(groups=np.array([0, 3, 5, 9]), seed=7, window=2)
    located = [order.locate(position)[:2] for position in (0, 1, 2, 8, 9, 17)]
    assert located == [(0, 4), (0, 5), (0, 6), (0, 2), (1, 8), (1, 4)]
    sets = [WeightedSet(0, 5, 0.4), WeightedSet(5, 9, 1.5)]
    order = Order(groups=np.array([0, 3, 5, 9]), seed=7, window=2, sets=sets)
    located = [order.locate(position) for position in (0, 1, 2, 7, 8, 15)]
    assert located == [(0, 6, 1), (0, 5, 0), (0, 6, 0), (0, 0, 0), (1, 0, 0), (1, 1, 0)]


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.0, 3.5), min_size=4, max_size=4),
    window=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_an_epoch_has_a_sample_as_often_as_its_weight_says(
    sizes: list[int], weights: list[float], window: int, seed: int
) -> None:
    """floor(w) times, and exactly round(frac(w) * n) of the set once more; never twice the same."""
    bounds = np.cumsum([0, *sizes]).tolist()
    sets = [WeightedSet(bounds[i], bounds[i + 1], weights[i]) for i in range(len(sizes))]
    middles = [(first + last) // 2 for first, last, _ in sets]  # two shards a set
    groups = np.unique([*bounds, *middles])
    order = Order(groups=groups, seed=seed, window=window, sets=sets)
    expected = [int(w) * n + round((w - int(w)) * n) for w, n in zip(weights, sizes, strict=False)]
    assert len(order) == sum(expected)
    for epoch in (0, 5):
        places = [order.locate(epoch * len(order) + place) for place in range(len(order))]
        assert len(set(places)) == len(places)
        assert {place.epoch for place in places} <= {epoch}
        times = Counter(place.sample for place in places)
        assert all(place.copy < times[place.sample] for place in places)
        for (first, last, weight), total in zip(sets, expected, strict=True):
            seen = [times[sample] for sample in range(first, last)]
            assert sum(seen) == total
            assert set(seen) <= {int(weight), int(weight) + 1}


def test_what_is_seen_once_more_changes_from_epoch_to_epoch() -> None:
    order = Order(groups=np.array([0, 200]), seed=0, window=1, sets=[WeightedSet(0, 200, 1.25)])
    once_more = [frozenset(order.epoch_order(epoch)[order.epoch_order(epoch) >= 200].tolist())
                 for epoch in range(4)]  # fmt: skip
    assert [len(chosen) for chosen in once_more] == [50] * 4
    assert len(set(once_more)) == 4
    overlap = len(once_more[0] & once_more[1])
    assert overlap < 30  # 12.5 by chance


def test_weight_1_is_no_weight() -> None:
    groups = np.array([0, 7, 12, 20])
    plain = Order(groups=groups, seed=3, window=2)
    weighted = Order(
        groups=groups, seed=3, window=2, sets=[WeightedSet(0, 12), WeightedSet(12, 20)]
    )
    for epoch in range(3):
        np.testing.assert_array_equal(plain.epoch_order(epoch), weighted.epoch_order(epoch))


IMAGENET = np.linspace(0, 1_281_167, 1025).astype(np.int64)


def test_an_epoch_of_imagenet() -> None:
    order = Order(groups=IMAGENET, seed=0, window=8).epoch_order(3)
    np.testing.assert_array_equal(np.bincount(order), np.ones(1_281_167))


@pytest.mark.parametrize("rank", [0, 7])
def test_a_resume_makes_no_epoch_but_its_own(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At update 1,000,000 of a global batch of 2048, 8 ranks: in epoch 1,598."""
    made: list[int] = []
    permute = Order._permute
    monkeypatch.setattr(
        Order, "_permute", lambda self, epoch: made.append(epoch) or permute(self, epoch)
    )
    order = Order(groups=IMAGENET, seed=0, window=8)
    share = Share(batch_size=256, rank=rank, world=8)
    sampler = TrainSampler(order=order, share=share, position=1_000_000 * 2048)
    batch = next(iter(sampler))
    assert made == [1_598]
    assert len({slot.sample for slot in batch}) == 256
    assert {slot.epoch for slot in batch} == {1_598}


def test_an_epoch_is_made_once_though_batches_cross_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    permute = Order._permute
    monkeypatch.setattr(
        Order, "_permute", lambda self, epoch: made.append(epoch) or permute(self, epoch)
    )
    order = Order(groups=np.array([0, 7, 12, 20]), seed=0, window=2)
    batches = iter(
        TrainSampler(order=order, share=Share(batch_size=6, rank=1, world=2), position=8)
    )
    positions = [8 + k * 12 + 6 + i for k in range(9) for i in range(6)]
    slots = [slot for _ in range(9) for slot in next(batches)]
    assert [slot.epoch for slot in slots] == [position // 20 for position in positions]
    assert made == [0, 1, 2, 3, 4, 5]


def test_no_window() -> None:
    with pytest.raises(UserError, match=r"data\.window is 0"):
        Order(groups=np.array([0, 3]), seed=0, window=0)
