"""Loader processes: room in shared memory is asked for before they start, and each has a thread."""

import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mimkit.batch import Views
from mimkit.data._shared_memory import check_shared_memory, free_shared_memory
from mimkit.data.loader import BatchLoader, eval_loader, train_loader
from mimkit.data.sources.shards import ShardSource
from mimkit.data.views import CenterView, TwoViews, ViewMaker
from mimkit.errors import UserError
from mimkit.random import Rng

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
NEEDED = 50_000_000 * 2 * 7 * 8  # bytes: 5.6 GB


def check(free: int | None) -> None:
    check_shared_memory(50_000_000, prefetch=2, workers=7, ranks=8, free_bytes=lambda: free)


@pytest.mark.parametrize("free", [None, NEEDED, NEEDED + 1])
def test_enough_shared_memory_is_enough(free: int | None) -> None:
    check(free)


def test_too_little_shared_memory_says_what_to_set() -> None:
    with pytest.raises(UserError) as caught:
        check(64_000_000)  # docker's default
    message = str(caught.value)
    assert "need 5,600.0 MB of shared memory (2 batches of 50.0 MB" in message
    assert "x 7 workers x 8 ranks" in message and "has 64.0 MB free" in message
    assert "--shm-size=7g" in message
    assert "engine.workers" in message and "train.batch_size" in message
    with pytest.raises(UserError):
        check(NEEDED - 1)


def test_a_system_without_that_folder_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mimkit.data._shared_memory._FOLDER", "/nowhere/at/all")
    assert free_shared_memory() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch is cut off
def test_a_worker_that_is_killed_is_told_wherever_this_process_is(shard_folder: Path) -> None:
    """As by a system without memory: torch raises in the middle of what is done with a batch."""
    source = ShardSource(shards=str(shard_folder))
    for waits in (True, False):
        before = set(multiprocessing.active_children())  # of other tests
        batches = iter(train_loader(source=source, views=CenterView(image_size=32), mask=None,
                                    seed=0, batch_size=2, rank=0, world=1, position=0, window=2,
                                    workers=1))  # fmt: skip
        next(batches)
        [worker] = set(multiprocessing.active_children()) - before
        assert worker.pid is not None
        with pytest.raises(UserError) as caught:
            os.kill(worker.pid, signal.SIGKILL)
            if waits:
                for _ in batches:
                    pass
            time.sleep(60)  # ends as the signal comes
        assert f"(pid {worker.pid})" in str(caught.value)
        assert "memory ran out" in str(caught.value) and "engine.workers" in str(caught.value)


@pytest.fixture
def source(shard_folder: Path) -> ShardSource:
    return ShardSource(shards=str(shard_folder))


def mask(rng: Rng) -> np.ndarray:
    return rng.random(16) < 0.4


def loader(source: ShardSource, *, workers: int, views: ViewMaker | None = None) -> BatchLoader:
    return train_loader(
        source=source, views=views or TwoViews(image_size=32, token_size=16), mask=mask, seed=0,
        batch_size=6, rank=0, world=2, position=0, window=1, workers=workers, local_world=2,
    )  # fmt: skip


BATCH = 6 * (3 * 32 * 32 + 3 * 16 * 16 + 16 + 8 + 8)  # views, mask, label, index


def test_the_loader_asks_for_what_its_batches_take(
    source: ShardSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = next(iter(loader(source, workers=1)))
    assert sum(field.nbytes for field in batch) == BATCH
    needed = BATCH * 2 * 3 * 2  # made ahead, workers, ranks
    for free, fits in ((needed, True), (needed - 1, False)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        batches = iter(loader(source, workers=3))
        if fits:
            next(batches)
        else:
            with pytest.raises(UserError, match=r"2 batches .* x 3 workers x 2 ranks"):
                next(batches)


def test_evaluation_asks_too_and_without_workers_nobody_does(
    source: ShardSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    next(iter(loader(source, workers=0)))
    evaluation = eval_loader(
        source=source, view=CenterView(image_size=24), mask=None, seed=0, batch_size=4, rank=0,
        world=1, workers=1,
    )  # fmt: skip
    with pytest.raises(UserError, match="shared memory"):
        next(iter(evaluation))


def test_kernels_are_compiled_before_loader_processes_start(
    source: ShardSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, here; what a loader process does to the list is not seen here."""
    called: list[str] = []
    monkeypatch.setattr("mimkit.data.views.load_kernels", lambda: called.append("here"))
    next(iter(loader(source, workers=2)))
    assert called == ["here"]


@dataclass(frozen=True)
class Threads:
    """Views that show with how many threads torch computes them."""

    def __call__(self, encoded: bytes, rng: Rng) -> Views:
        view = torch.full((3, 1, 1), torch.get_num_threads(), dtype=torch.uint8)
        return Views(view, view)


def test_a_loader_process_has_one_thread(source: ShardSource) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        here = next(iter(loader(source, workers=0, views=Threads())))
        there = next(iter(loader(source, workers=1, views=Threads())))
    finally:
        torch.set_num_threads(before)
    assert here.patch_view_BCHW.unique().tolist() == [2]
    assert there.patch_view_BCHW.unique().tolist() == [1]
