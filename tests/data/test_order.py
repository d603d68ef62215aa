"""The order is a permutation, a function of (seed, epoch), and quick."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimkit.data.order import Order
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
    assert {e for e, _ in located} == {epoch}
    assert sorted(sample for _, sample in located) == list(range(n))
    # a window of samples comes from `window` shards only
    shards = np.searchsorted(groups, [sample for _, sample in located], "right") - 1
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
    located = [order.locate(position) for position in (0, 1, 2, 8, 9, 17)]
    assert located == [(0, 4), (0, 5), (0, 6), (0, 2), (1, 8), (1, 4)]


def test_an_epoch_of_imagenet() -> None:
    order = Order(groups=np.linspace(0, 1_281_167, 1025).astype(np.int64), seed=0, window=8)
    started = time.process_time()
    order.locate(0)
    assert time.process_time() - started < 0.5  # 0.06 s on an idle core


def test_no_window() -> None:
    with pytest.raises(UserError, match=r"data\.window is 0"):
        Order(groups=np.array([0, 3]), seed=0, window=0)
