"""Who computes a batch does not change it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from mimkit.batch import Batch, Views
from mimkit.data.loader import PADDING, eval_loader, train_loader
from mimkit.data.sources.shards import ShardSource
from mimkit.data.views import CenterView, TwoViews
from mimkit.data.writer import Item, write_shard
from mimkit.errors import UserError
from mimkit.random import Rng

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
VIEWS = TwoViews(image_size=32, token_size=16)
STEPS = 8  # of 6 samples: crosses the end of the epoch of 20 twice, inside a batch


def mask(rng: Rng) -> np.ndarray:
    return rng.random(16) < 0.4


@pytest.fixture
def source(shard_folder: Path) -> ShardSource:
    return ShardSource(shards=str(shard_folder))


def stream(
    source: ShardSource,
    *,
    batch_size: int = 6,
    rank: int = 0,
    world: int = 1,
    position: int = 0,
    workers: int = 0,
    seed: int = 3,
    window: int = 2,
) -> Iterator[Batch]:
    return iter(
        train_loader(
            source=source,
            views=VIEWS,
            mask=mask,
            seed=seed,
            batch_size=batch_size,
            rank=rank,
            world=world,
            position=position,
            window=window,
            workers=workers,
        )
    )


def hashes(batch: Batch) -> list[str]:
    """One for each sample: of both views, mask, label and index."""
    samples = zip(*(field.numpy() for field in batch), strict=True)
    return [hashlib.sha1(b"".join(f.tobytes() for f in fields)).hexdigest() for fields in samples]


def fingerprints(batches: Iterator[Batch], num_batches: int) -> list[str]:
    return [sample for batch in islice(batches, num_batches) for sample in hashes(batch)]


@pytest.fixture
def expected(source: ShardSource) -> list[str]:
    return fingerprints(stream(source), STEPS)


def test_an_epoch_has_every_sample_once(source: ShardSource) -> None:
    index = torch.cat([batch.index_B for batch in islice(stream(source, batch_size=5), 8)])
    assert sorted(index[:20].tolist()) == sorted(index[20:].tolist()) == list(range(20))
    assert index[:20].tolist() != index[20:].tolist()


def test_batches_are_what_the_step_expects(source: ShardSource) -> None:
    batch = next(stream(source))
    assert batch.patch_view_BCHW.shape == (6, 3, 32, 32)
    assert batch.token_view_BChw.shape == (6, 3, 16, 16)
    assert batch.patch_view_BCHW.dtype == batch.token_view_BChw.dtype == torch.uint8
    assert batch.mask_BN.shape == (6, 16) and batch.mask_BN.dtype == torch.bool
    assert torch.equal(batch.label_B, batch.index_B)  # as the shards were made


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_matter(source: ShardSource, expected: list[str], workers: int) -> None:
    assert fingerprints(stream(source, workers=workers), STEPS) == expected


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_batch_size_does_not_matter(
    source: ShardSource, expected: list[str], batch_size: int
) -> None:
    batches = stream(source, batch_size=batch_size)
    assert fingerprints(batches, 48 // batch_size) == expected


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_do_not_matter(source: ShardSource, expected: list[str], world: int) -> None:
    """With the same global batch of 12, and one stream in any case."""
    size = 12 // world
    ranks = [stream(source, batch_size=size, rank=r, world=world) for r in range(world)]
    together = [sample for _ in range(4) for rank in ranks for sample in hashes(next(rank))]
    assert together == expected


@pytest.mark.parametrize("done", [1, 3, 4, 7])
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 1)])
def test_resume_is_exact(
    source: ShardSource, expected: list[str], done: int, world: int, workers: int
) -> None:
    size = 6 // world
    position = done * size * world
    ranks = [
        stream(source, batch_size=size, rank=r, world=world, position=position, workers=workers)
        for r in range(world)
    ]
    rest = [s for _ in range(STEPS - done) for rank in ranks for s in hashes(next(rank))]
    assert rest == expected[position:]


def test_seeds_matter_and_nothing_global_does(source: ShardSource, expected: list[str]) -> None:
    assert fingerprints(stream(source, seed=4), STEPS) != expected
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    np.random.seed(1)
    assert fingerprints(stream(source, workers=1), STEPS) == expected
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_a_mask(source: ShardSource) -> None:
    loader = train_loader(
        source=source, views=VIEWS, mask=None, seed=0, batch_size=2, rank=0, world=1, position=0,
        window=1, workers=0,
    )  # fmt: skip
    assert next(iter(loader)).mask_BN.shape == (2, 0)
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 11, 100])
def test_evaluation_sees_each_sample_once(
    source: ShardSource, world: int, limit: int | None
) -> None:
    seen, lengths = {}, set()
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
            for index, sample in zip(batch.index_B.tolist(), hashes(batch), strict=True):
                if index != PADDING:
                    assert index not in seen
                    seen[index] = sample
    assert len(lengths) == 1
    assert sorted(seen) == list(range(min(limit or 20, 20)))
    alone = eval_loader(
        source=source, view=CenterView(image_size=24), mask=mask, seed=5, batch_size=20, rank=0,
        world=1, workers=0,
    )  # fmt: skip
    assert all(hashes(next(iter(alone)))[index] == sample for index, sample in seen.items())


@pytest.fixture
def with_a_bad_sample(tmp_path: Path, jpegs: list[bytes]) -> ShardSource:
    items = [Item(f"k{i}", jpegs[i], "jpg", i) for i in range(10)]
    items[4] = items[4]._replace(image=jpegs[4][:700])
    write_shard(tmp_path / "bad.tar", items, split="train")
    return ShardSource(shards=str(tmp_path / "bad.tar"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_says_which_and_why(with_a_bad_sample: ShardSource, workers: int) -> None:
    with pytest.raises(UserError) as caught:
        list(islice(stream(with_a_bad_sample, batch_size=2, workers=workers, window=1), 5))
    message = str(caught.value)
    assert message.startswith("sample 4, key 'k4', in ")
    assert "bad.tar at byte " in message and "Premature end" in message
    assert "on_bad_sample=substitute" in message and "Traceback" not in message


def test_a_bad_sample_is_substituted_and_counted(with_a_bad_sample: ShardSource) -> None:
    loader = train_loader(
        source=with_a_bad_sample, views=VIEWS, mask=mask, seed=0, batch_size=5, rank=0, world=1,
        position=0, window=1, workers=1, on_bad_sample="substitute",
    )  # fmt: skip
    counts = [(batch.index_B.tolist(), loader.num_substituted) for batch in islice(loader, 4)]
    index = [i for batch, _ in counts for i in batch]
    assert sorted(index[:10]) == sorted(index[10:]) == [0, 1, 2, 3, 5, 5, 6, 7, 8, 9]
    assert counts[1][1] == 1 and counts[3][1] == 2


@dataclass(frozen=True)
class Broken:
    """A bug of ours, not of the data."""

    def __call__(self, encoded: bytes, rng: Rng) -> Views:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("workers", [0, 1])
def test_our_own_bugs_keep_their_traceback(source: ShardSource, workers: int) -> None:
    loader = train_loader(
        source=source, views=Broken(), mask=None, seed=0, batch_size=2, rank=0, world=1,
        position=0, window=1, workers=workers,
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError, match="a bug"):
        next(iter(loader))
