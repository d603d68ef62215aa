"""Shards are brought near in the order in which they are needed, and not twice."""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from mimkit.batch import Sample
from mimkit.data import ahead
from mimkit.data.ahead import Ahead, Bringer, coming
from mimkit.data.order import Order, WeightedSet
from mimkit.data.sources import Source
from mimkit.data.sources.shards import ShardSource
from mimkit.data.tars import LocalTar
from mimkit.errors import UserError

GROUPS = np.array([0, 3, 4, 9, 12, 20, 21], np.int64)


def order(window: int = 2, sets: list[WeightedSet] | None = None) -> Order:
    return Order(groups=GROUPS, seed=1, window=window, sets=sets)


@pytest.mark.parametrize("sets", [None, [WeightedSet(0, 9, 2.5), WeightedSet(9, 21, 0.5)]])
@pytest.mark.parametrize(("position", "span"), [(0, 1), (0, 7), (5, 10), (18, 9), (40, 30)])
def test_what_is_coming(position: int, span: int, sets: list[WeightedSet] | None) -> None:
    """Against the stream itself, place by place."""
    stream = order(sets=sets)
    samples = [stream.locate(place).sample for place in range(position, position + span)]
    shards = [int(np.searchsorted(GROUPS, sample, "right")) - 1 for sample in samples]
    assert coming(stream, GROUPS, position=position, span=span) == list(dict.fromkeys(shards))


def test_a_long_look_ahead_ends_after_two_epochs() -> None:
    found = coming(order(), GROUPS, position=3, span=10**9)
    assert sorted(found) == list(range(6))


class Recorder:
    """In the place of `Bringer`: what is wanted, without threads."""

    def __init__(self, bring) -> None:
        self.bring = bring
        self.wanted: list[list[int]] = []
        recorders.append(self)

    def want(self, numbers: Sequence[int]) -> None:
        self.wanted.append(list(numbers))


recorders: list[Recorder] = []


@pytest.fixture
def source(shard_folder: Path) -> ShardSource:
    return ShardSource(shards=str(shard_folder))


@pytest.mark.parametrize("position", [0, 11])
def test_what_batches_need_was_wanted_before(
    source: ShardSource, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    monkeypatch.setattr(ahead, "Bringer", Recorder)
    stream = Order(groups=source.groups, seed=0, window=1)
    follower = Ahead(source=source, order=stream, position=position, step=2, lead=4, window=1)
    recorder = recorders.pop()
    for number, batch in enumerate(islice(follower.follow(iter(range(30))), 30)):
        assert batch == number
        first = position + 2 * number  # its readers are at most 4 positions further
        needed = coming(stream, source.groups, position=first, span=2 + 4)
        assert set(needed) <= set(recorder.wanted[-1])
    assert 5 < len(recorder.wanted) < 30
    assert all(len(wanted) <= 3 for wanted in recorder.wanted)


class Uneven(Source):
    """Six shards of one sample, and six of ten."""

    groups = np.cumsum([0, *[1] * 6, *[10] * 6])

    def __len__(self) -> int:
        return 66

    def __getitem__(self, index: int) -> Sample:
        raise NotImplementedError

    digest = labels = keys = property()

    def tar_of(self, index: int) -> LocalTar:
        return LocalTar(Path(str(index)), 0, 0)


def test_no_more_is_wanted_than_room_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows of two shards; in places, as many samples lie in seven shards and more."""
    monkeypatch.setattr(ahead, "Bringer", Recorder)
    source = Uneven()
    stream = Order(groups=source.groups, seed=0, window=2)
    follower = Ahead(source=source, order=stream, position=0, step=1, lead=0, window=2)
    list(follower.follow(iter(range(300))))
    wanted = recorders.pop().wanted
    assert max(len(numbers) for numbers in wanted) == 4
    spans = [coming(stream, source.groups, position=p, span=22) for p in range(300)]
    assert max(len(numbers) for numbers in spans) > 6


def test_nothing_is_wanted_any_more_when_the_stream_is_closed(
    source: ShardSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "Bringer", Recorder)
    stream = Order(groups=source.groups, seed=0, window=1)
    follower = Ahead(source=source, order=stream, position=0, step=2, lead=0, window=1)
    batches = follower.follow(iter("abc"))
    assert next(batches) == "a"
    batches.close()
    assert recorders.pop().wanted[-1] == []


def test_a_bringer_brings_each_once_and_the_first_ones_first() -> None:
    calls, done = [], threading.Event()

    def bring(number: int, again: bool) -> None:
        calls.append((number, again))
        if number == 9:
            done.set()

    bringer = Bringer(bring, at_once=1)
    bringer.want([4, 2, 9])
    assert done.wait(60)
    assert calls == [(4, False), (2, False), (9, False)]
    done.clear()
    bringer.want([2, 5, 9])
    assert done.wait(60)
    assert calls[3:] == [(2, True), (5, False), (9, True)]


@pytest.mark.parametrize(
    ("at_once", "expected"),
    [
        (1, [(1, False), (1, True), (4, False)]),  # 2 and 3 are forgotten
        (2, [(1, False), (4, False)]),  # and 1 is not begun twice
    ],
)
def test_only_what_was_wanted_last_is_begun(at_once: int, expected: list) -> None:
    calls, began, go_on, done = [], threading.Event(), threading.Event(), threading.Event()

    def bring(number: int, again: bool) -> None:
        calls.append((number, again))
        if number == 4:
            done.set()
        elif not began.is_set():
            began.set()
            assert go_on.wait(60)

    bringer = Bringer(bring, at_once=at_once)
    bringer.want([1])
    assert began.wait(60)
    if at_once == 1:
        bringer.want([1, 2, 3])
        bringer.want([1, 4])
        go_on.set()
    else:
        bringer.want([1, 4])
    assert done.wait(60)
    go_on.set()
    assert calls == expected


def test_at_most_so_many_at_once() -> None:
    together, most, lock = [0], [0], threading.Lock()
    both = threading.Barrier(3)

    def bring(number: int, again: bool) -> None:
        with lock:
            together[0] += 1
            most[0] = max(most[0], together[0])
        both.wait(60)
        with lock:
            together[0] -= 1

    bringer = Bringer(bring, at_once=3)
    bringer.want(range(9))
    for thread in threading.enumerate():
        if thread.name == "mimkit-ahead":
            thread.join(60)
    assert most == [3] and together == [0]


def test_a_shard_that_cannot_be_brought_does_not_stop_the_others(
    source: ShardSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "Bringer", Recorder)
    stream = Order(groups=source.groups, seed=0, window=1)
    Ahead(source=source, order=stream, position=0, step=2, lead=0, window=1)
    bring = recorders.pop().bring
    os.truncate(source.tars[1].path, 3)
    with pytest.raises(UserError, match="changed while it was in use"):
        source.tars[1].bring_near(again=False)
    bring(1, False)  # who reads it will hear of it


@pytest.fixture
def advice(source: ShardSource) -> list[tuple[int, int, int]]:
    """What the system is told about the tars of `source`: file, range, advice."""
    told: list[tuple[int, int, int]] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length) == (0, 0)  # the whole file
        told.append((os.fstat(descriptor).st_ino, advice, threading.get_ident()))

    source.tars = [replace(tar, advise=advise) for tar in source.tars]
    return told


def test_the_system_is_told_once_what_will_be_read(source: ShardSource, advice: list) -> None:
    tar = source.tars[0]
    tar.bring_near(again=False)
    tar.bring_near(again=True)
    assert [told[:2] for told in advice] == [(tar.path.stat().st_ino, os.POSIX_FADV_WILLNEED)]
    replace(tar, advise=None).bring_near(again=False)  # a system without it
    tar.path.unlink()
    tar.bring_near(again=False)
    assert len(advice) == 1


def test_the_stream_of_a_local_set_is_read_ahead_by_another_thread(
    source: ShardSource, advice: list
) -> None:
    stream = Order(groups=source.groups, seed=0, window=1)
    follower = Ahead(source=source, order=stream, position=0, step=2, lead=0, window=1)
    batches = follower.follow(iter(range(10)))
    for _ in batches:
        for thread in threading.enumerate():
            if thread.name == "mimkit-ahead":
                thread.join(60)
    files = [told[0] for told in advice]
    assert set(files) == {tar.path.stat().st_ino for tar in source.tars}
    assert len(files) <= 2 * len(source.tars)  # an epoch, and the beginning of the next
    assert threading.get_ident() not in [told[2] for told in advice]


def test_tars_can_be_sent_to_other_processes(source: ShardSource) -> None:
    import pickle

    tar = source.tars[0]
    assert isinstance(tar, LocalTar) and pickle.loads(pickle.dumps(tar)) == tar
