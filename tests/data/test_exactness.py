"""Who computes a batch does not change it: workers, ranks, batch cuts, stops and kills, on real
photographs, by hashes of both views, mask, label, number and key of every sample.

Every test is run over every kind of source.
"""

import math
import multiprocessing
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from test_loader import hashes, mask, stream

from mimkit.batch import Batch
from mimkit.data.loader import PADDING, eval_loader
from mimkit.data.mixture import Ingredient, MixtureSource
from mimkit.data.selection import split_heldout, take_fraction, take_listed
from mimkit.data.sources import Source
from mimkit.data.sources.folder import FolderSource
from mimkit.data.sources.shards import ShardSource
from mimkit.data.views import CenterView

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
GLOBAL = 12  # samples in a global batch
STEPS = 4  # of them: past the end of an epoch, inside a batch, with every source


def _shards(folder: Path, jpegs: list[bytes]) -> Source:
    return ShardSource(shards=str(folder))


def _folder(folder: Path, jpegs: list[bytes]) -> Source:
    for i, jpeg in enumerate(jpegs):
        path = folder.parent / "images" / f"class{i % 3}" / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg)
    return FolderSource(folder=folder.parent / "images")


def _fraction(folder: Path, jpegs: list[bytes]) -> Source:
    return take_fraction(_shards(folder, jpegs), fraction=0.55, stratified=False, seed=0)


def _stratified(folder: Path, jpegs: list[bytes]) -> Source:
    return take_fraction(_folder(folder, jpegs), fraction=0.65, stratified=True, seed=1)


def _listed(folder: Path, jpegs: list[bytes]) -> Source:
    (folder / "keys.txt").write_text("".join(f"cat/{i:03d}\n" for i in (19, 3, 4, 11, 0)))
    return take_listed(_shards(folder, jpegs), folder / "keys.txt")


def _without_heldout(folder: Path, jpegs: list[bytes]) -> Source:
    return split_heldout(_shards(folder, jpegs), fraction=0.3)[0]


def _mixture(folder: Path, jpegs: list[bytes]) -> Source:
    """7 samples 2.7 times (19), 5 samples 0.4 times (2), 8 samples once."""
    weights = {"0": 2.7, "1": 0.4, "2": 1.0}
    return MixtureSource(
        [Ingredient(n, ShardSource(shards=str(folder / f"train-0000{n}.tar")), w)
         for n, w in weights.items()]
    )  # fmt: skip


def _part_of_mixture(folder: Path, jpegs: list[bytes]) -> Source:
    """4 samples 2.7 times (11), 3 samples 0.4 times (1), 5 samples once."""
    return take_fraction(_mixture(folder, jpegs), fraction=0.6, stratified=False, seed=0)


KINDS: dict[str, Callable[[Path, list[bytes]], Source]] = {
    "shards": _shards, "folder": _folder, "fraction": _fraction, "stratified": _stratified,
    "listed": _listed, "without_heldout": _without_heldout, "mixture": _mixture,
    "part_of_mixture": _part_of_mixture,
}  # fmt: skip


@pytest.fixture(params=KINDS, scope="module")
def source(
    request: pytest.FixtureRequest, written_shards: Path, jpegs: list[bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> Source:  # fmt: skip
    folder = tmp_path_factory.mktemp(request.param) / "shards"
    return KINDS[request.param](Path(shutil.copytree(written_shards, folder)), jpegs)


def prints(source: Source, batch: Batch) -> list[str]:
    """A hash for each sample, and its key."""
    keys = source.keys
    pairs = zip(hashes(batch), batch.index_B.tolist(), strict=True)
    return [f"{found} {keys[index]}" for found, index in pairs]


def samples(source: Source, batches: Iterable[Batch], num_samples: int) -> list[str]:
    every = chain.from_iterable(prints(source, batch) for batch in batches)
    return list(islice(every, num_samples))


@pytest.fixture(scope="module")
def expected(source: Source) -> list[str]:
    """What one process makes, without workers and without a stop, in batches of `GLOBAL`."""
    found = samples(source, stream(source, batch_size=GLOBAL), STEPS * GLOBAL)
    assert source.epoch_length % GLOBAL and source.epoch_length < STEPS * GLOBAL
    assert len(set(found)) == len(found)  # no two are alike: other crops, also of one image
    return found


def test_an_epoch_has_every_sample_as_often_as_it_should(source: Source) -> None:
    length = source.epoch_length
    batches = islice(stream(source, batch_size=5), math.ceil(3 * length / 5))
    index = torch.cat([batch.index_B for batch in batches]).tolist()
    orders = [tuple(index[epoch * length : (epoch + 1) * length]) for epoch in range(3)]
    assert len(set(orders)) == 3
    for order in orders:
        times = Counter(order)
        for first, last, weight in source.sets:
            seen = [times[sample] for sample in range(first, last)]
            assert set(seen) <= {math.floor(weight), math.ceil(weight)}
            whole = math.floor(weight) * (last - first)
            assert sum(seen) == whole + round((weight - math.floor(weight)) * (last - first))


def test_an_index_is_the_number_of_its_sample(source: Source) -> None:
    batch = next(iter(stream(source, batch_size=GLOBAL)))
    for index, label in zip(batch.index_B.tolist(), batch.label_B.tolist(), strict=True):
        sample = source[index]
        assert (sample.index, sample.key) == (index, source.keys[index])
        assert sample.label == label == source.labels[index]
    with pytest.raises(IndexError):
        source[len(source)]


def test_a_sample_knows_its_shard(source: Source) -> None:
    """That is what the next shards are brought near by; a folder of images has none."""
    for index in range(len(source)):
        origin, tar = source[index].origin, source.tar_of(index)
        assert origin.endswith(".jpg") if tar is None else origin.startswith(f"{tar} at byte ")
    firsts = [str(source.tar_of(first)) for first in source.groups[:-1].tolist()]
    assert len(set(firsts)) == len(firsts)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_matter(source: Source, expected: list[str], workers: int) -> None:
    batches = stream(source, batch_size=GLOBAL, workers=workers)
    assert samples(source, batches, len(expected)) == expected


@pytest.mark.parametrize("batch_size", [1, 5, 16, 48])
def test_the_batch_size_does_not_matter(
    source: Source, expected: list[str], batch_size: int
) -> None:
    batches = stream(source, batch_size=batch_size)
    assert samples(source, batches, len(expected)) == expected


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_give_the_same_global_batches(
    source: Source, expected: list[str], world: int
) -> None:
    assert _global_batches(source, world=world) == _cut(expected)


def _cut(found: list[str]) -> list[list[str]]:
    return [found[first : first + GLOBAL] for first in range(0, len(found), GLOBAL)]


def _global_batches(
    source: Source, *, world: int, position: int = 0, workers: int = 0
) -> list[list[str]]:
    """From `position` to the end of `expected`: ranks one after the other, as they lie in it."""
    size = GLOBAL // world
    ranks = [
        iter(stream(source, batch_size=size, rank=rank, world=world, position=position,
                    workers=workers))
        for rank in range(world)
    ]  # fmt: skip
    steps = (STEPS * GLOBAL - position) // GLOBAL
    return [[s for rank in ranks for s in prints(source, next(rank))] for _ in range(steps)]


@pytest.mark.parametrize("done", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_resume_is_exact_on_any_number_of_ranks(
    source: Source, expected: list[str], done: int, world: int
) -> None:
    rest = _global_batches(source, world=world, position=done * GLOBAL)
    assert rest == _cut(expected)[done:]


@pytest.mark.parametrize("position", [1, 7, 11, 19, 20, 21, 47])
def test_a_resume_is_exact_at_any_sample(
    source: Source, expected: list[str], position: int
) -> None:
    """With another batch size than before; the position is the whole state."""
    batches = stream(source, batch_size=5, position=position)
    assert samples(source, batches, len(expected) - position) == expected[position:]


def test_a_resume_with_workers_is_exact(source: Source, expected: list[str]) -> None:
    assert _global_batches(source, world=2, position=GLOBAL, workers=1) == _cut(expected)[1:]


def _log(source: Source, log: Path, workers: int) -> None:
    """Goes on where `log` ends, a line a batch; what a training does between checkpoints."""
    torch.set_num_threads(1)
    done = _whole_lines(log)
    log.write_text("".join(f"{line}\n" for line in done))  # a torn line is no batch
    batches = stream(source, batch_size=3, position=3 * len(done), workers=workers)
    with log.open("a", buffering=1) as file:
        for batch in islice(batches, STEPS * GLOBAL // 3 - len(done)):
            file.write(";".join(prints(source, batch)) + "\n")
            time.sleep(0.005)  # so that the kill finds it at work


def _whole_lines(log: Path) -> list[str]:
    return log.read_text().split("\n")[:-1] if log.exists() else []


def test_killed_at_random_moments(source: Source, expected: list[str], tmp_path: Path) -> None:
    """Three times by kill -9, each time with another number of workers."""
    log, fork, codes = tmp_path / "log", multiprocessing.get_context("fork"), list[int | None]()
    for workers in (1, 0, 2):
        process = fork.Process(target=_log, args=(source, log, workers))
        enough = len(_whole_lines(log)) + random.randint(1, 4)
        process.start()
        limit = time.monotonic() + 60
        while len(_whole_lines(log)) < enough and process.is_alive():
            assert time.monotonic() < limit
            time.sleep(random.uniform(0, 0.003))
        process.kill()
        process.join()
        codes.append(process.exitcode)
        process.close()
    assert -signal.SIGKILL in codes
    _log(source, log, 1)
    assert [s for line in _whole_lines(log) for s in line.split(";")] == expected


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [None, 11, 3, 1])
def test_an_evaluation_counts_every_sample_once(
    source: Source, world: int, limit: int | None
) -> None:
    """Also of fewer samples than ranks x batch; each rank has equally many full batches."""
    seen, lengths = list[str](), set[int]()
    for rank in range(world):
        loader = eval_loader(
            source=source, view=CenterView(image_size=24), mask=mask, seed=5, batch_size=4,
            rank=rank, world=world, workers=0, limit=limit,
        )  # fmt: skip
        batches = list(loader)
        assert len(loader) == len(batches)
        lengths.add(len(batches))
        for batch in batches:
            assert len(batch.index_B) == 4
            seen += [hashes(batch)[i] for i in range(4) if batch.index_B[i] != PADDING]
    num_samples = min(limit or len(source), len(source))
    assert lengths == {math.ceil(num_samples / (4 * world))}
    assert len(set(seen)) == len(seen) == num_samples
    alone = eval_loader(
        source=source, view=CenterView(image_size=24), mask=mask, seed=5, batch_size=num_samples,
        rank=0, world=1, workers=0, limit=limit,
    )  # fmt: skip
    batch = next(iter(alone))
    assert sorted(hashes(batch)) == sorted(seen)
    if len(source.sets) == 1:
        assert batch.index_B.tolist() == list(range(num_samples))
