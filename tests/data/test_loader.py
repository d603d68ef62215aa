"""What a batch holds, and what happens to samples that are bad. That batches are exact, whoever
computes them, is in test_exactness.py."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from mimkit.batch import Batch, Views
from mimkit.data.loader import BatchLoader, OnBadSample, train_loader
from mimkit.data.order import Order
from mimkit.data.sources import Source
from mimkit.data.sources.folder import FolderSource
from mimkit.data.sources.shards import ShardSource
from mimkit.data.views import TwoViews
from mimkit.data.writer import Item, write_shard
from mimkit.errors import UserError
from mimkit.random import Purpose, Rng, generator

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
VIEWS = TwoViews(image_size=32, token_size=16)


def mask(rng: Rng) -> np.ndarray:
    return rng.random(16) < 0.4


@pytest.fixture
def source(shard_folder: Path) -> ShardSource:
    return ShardSource(shards=str(shard_folder))


def stream(
    source: Source,
    *,
    batch_size: int = 6,
    rank: int = 0,
    world: int = 1,
    position: int = 0,
    workers: int = 0,
    seed: int = 3,
    window: int = 2,
    on_bad_sample: OnBadSample = "raise",
) -> BatchLoader:
    return train_loader(
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
        on_bad_sample=on_bad_sample,
    )


def hashes(batch: Batch) -> list[str]:
    """One for each sample: of both views, mask, label and index."""
    samples = zip(*(field.numpy() for field in batch), strict=True)
    return [hashlib.sha1(b"".join(f.tobytes() for f in fields)).hexdigest() for fields in samples]


def fingerprints(batches: Iterable[Batch], num_batches: int) -> list[str]:
    return [sample for batch in islice(batches, num_batches) for sample in hashes(batch)]


def test_batches_are_what_the_step_expects(source: ShardSource) -> None:
    batch = next(iter(stream(source)))
    assert batch.patch_view_BCHW.shape == (6, 3, 32, 32)
    assert batch.token_view_BChw.shape == (6, 3, 16, 16)
    assert batch.patch_view_BCHW.dtype == batch.token_view_BChw.dtype == torch.uint8
    assert batch.mask_BN.shape == (6, 16) and batch.mask_BN.dtype == torch.bool
    assert torch.equal(batch.label_B, batch.index_B)  # as the shards were made


def test_seeds_matter_and_nothing_global_does(source: ShardSource) -> None:
    expected = fingerprints(stream(source), 4)
    assert set(fingerprints(stream(source, seed=4), 4)).isdisjoint(expected)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    np.random.seed(1)
    assert fingerprints(stream(source, workers=1), 4) == expected
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_a_mask(source: ShardSource) -> None:
    loader = train_loader(
        source=source, views=VIEWS, mask=None, seed=0, batch_size=2, rank=0, world=1, position=0,
        window=1, workers=0,
    )  # fmt: skip
    assert next(iter(loader)).mask_BN.shape == (2, 0)
    with pytest.raises(TypeError):
        len(loader)


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
    loader = stream(
        with_a_bad_sample, batch_size=5, workers=1, window=1, on_bad_sample="substitute"
    )
    index, causes = list[int](), list[str]()
    for number, batch in enumerate(islice(loader, 4), start=1):
        index += batch.index_B.tolist()
        causes += loader.bad
        assert loader.num_substituted == len(causes)
        if number in (2, 4):  # the end of an epoch
            assert len(causes) == number // 2
    assert sorted(index[:10]) == sorted(index[10:]) == [0, 1, 2, 3, 5, 5, 6, 7, 8, 9]
    assert set(causes) == {causes[0]}
    assert causes[0].startswith("sample 4, key 'k4', in ") and "Premature end" in causes[0]


def test_a_substitute_looks_as_the_bad_sample_would(with_a_bad_sample: ShardSource) -> None:
    """It has the crop and the mask of the place where it stands in, and shifts nobody else."""
    loader = stream(with_a_bad_sample, batch_size=10, window=1, on_bad_sample="substitute")
    batch = next(iter(loader))
    order = Order(groups=with_a_bad_sample.groups, seed=3, window=1)
    place = [order.locate(position).sample for position in range(10)].index(4)
    assert batch.index_B[place] == 5
    sample = with_a_bad_sample[5]
    views = VIEWS(sample.image, generator(Purpose.VIEW, seed=3, epoch=0, sample=4))
    assert torch.equal(batch.patch_view_BCHW[place], views.patch_view_CHW)
    assert torch.equal(batch.token_view_BChw[place], views.token_view_Chw)
    drawn = mask(generator(Purpose.MASK, seed=3, epoch=0, sample=4))
    assert batch.mask_BN[place].tolist() == drawn.tolist()


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (5, 0), (2, 2)])
def test_a_bad_sample_shifts_no_rank(
    with_a_bad_sample: ShardSource, world: int, workers: int
) -> None:
    def ranks(world: int, workers: int) -> tuple[list[str], int]:
        loaders = [
            stream(with_a_bad_sample, batch_size=10 // world, rank=rank, world=world, window=1,
                   workers=workers, on_bad_sample="substitute")
            for rank in range(world)
        ]  # fmt: skip
        iterators = [iter(loader) for loader in loaders]
        together = [s for _ in range(3) for batches in iterators for s in hashes(next(batches))]
        return together, sum(loader.num_substituted for loader in loaders)

    assert ranks(world, workers) == ranks(1, 0)
    assert ranks(world, workers)[1] == 3  # once an epoch


def test_many_bad_samples_in_a_row_are_a_damaged_set(tmp_path: Path, jpegs: list[bytes]) -> None:
    """17 neighbours at least; 16 are passed over."""

    def items(bad: int) -> list[Item]:
        images = [jpegs[i % 20][: 700 if i < bad else None] for i in range(24)]
        return [Item(f"k{i:02d}", image, "jpg", i) for i, image in enumerate(images)]

    for bad in (16, 17):
        write_shard(tmp_path / f"{bad}.tar", items(bad), split="train")
    passed = stream(ShardSource(shards=str(tmp_path / "16.tar")), batch_size=24, window=1,
                    on_bad_sample="substitute")  # fmt: skip
    assert sorted(next(iter(passed)).index_B.tolist()) == [16] * 17 + [*range(17, 24)]
    assert passed.num_substituted == 16
    stuck = stream(ShardSource(shards=str(tmp_path / "17.tar")), batch_size=24, window=1,
                   on_bad_sample="substitute")  # fmt: skip
    with pytest.raises(UserError, match=r"key 'k16', .* Nor can the 16 samples before it"):
        next(iter(stuck))


def test_a_file_that_is_gone_is_a_bad_sample(tmp_path: Path, jpegs: list[bytes]) -> None:
    for i in range(4):
        (tmp_path / f"{i}.jpg").write_bytes(jpegs[i])
    source = FolderSource(folder=tmp_path)
    (tmp_path / "2.jpg").unlink()
    loader = stream(source, batch_size=4, on_bad_sample="substitute")
    assert sorted(next(iter(loader)).index_B.tolist()) == [0, 1, 3, 3]
    assert loader.bad == (f"{tmp_path / '2.jpg'} cannot be read: No such file or directory",)
    with pytest.raises(UserError, match=r"2\.jpg cannot be read.*on_bad_sample=substitute"):
        next(iter(stream(source, batch_size=4)))


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
