"""Training from addresses is training from the same files in a local folder."""

import hashlib
import pickle
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from shard_server import (
    PIECE,
    ShardServer,
    answer,
    drop,
    serving,
    status,
    truncate,
)

from mimkit.batch import Batch
from mimkit.data.decode import DecodeError
from mimkit.data.loader import BatchLoader, eval_loader, train_loader
from mimkit.data.make_shards import make_shards
from mimkit.data.mixture import Ingredient, MixtureSource
from mimkit.data.remote.cache import ShardCache
from mimkit.data.remote.retry import Patience
from mimkit.data.remote.space import GIB
from mimkit.data.sources import Source
from mimkit.data.sources.shards import ShardSource
from mimkit.data.subset import SubsetSource
from mimkit.data.views import CenterView, TwoViews
from mimkit.data.writer import Item, write_manifest, write_shard
from mimkit.errors import UserError
from mimkit.random import Rng

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
SHARDS, IN_SHARD = 10, 4
STEPS = 50  # of 2 samples: two and a half epochs


@pytest.fixture
def folder(tmp_path: Path, jpegs: list[bytes]) -> Path:
    """Ten shards of four samples, with manifest and classes."""
    folder, records = tmp_path / "shards", []
    folder.mkdir()
    for number in range(SHARDS):
        images = [jpegs[(3 * number + i) % len(jpegs)] for i in range(IN_SHARD)]
        items = [Item(f"{number}/{i}", image, "jpg", i) for i, image in enumerate(images)]
        records.append(write_shard(folder / f"train-{number:03d}.tar", items, split="train"))
    write_manifest(folder, records, source="cat", classes=["a", "b", "c", "d"], settings={})
    return folder


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardServer]:
    quick = partial(ShardCache, piece=PIECE, patience=Patience(sleep=_no_sleep))
    monkeypatch.setattr("mimkit.data.sources.shards.ShardCache", quick)
    with serving(folder) as server:
        yield server


def _no_sleep(seconds: float) -> None:
    pass


def addresses(server: ShardServer) -> str:
    return server.url(f"train-{{000..{SHARDS - 1:03d}}}.tar")


def largest(folder: Path, num: int) -> int:
    """Bytes of the `num` largest shards."""
    return sum(sorted((path.stat().st_size for path in folder.glob("*.tar")), reverse=True)[:num])


def used(folder: Path) -> int:
    kept = [path for path in folder.iterdir() if path.suffix in (".tar", ".part")]
    return sum(path.stat().st_size for path in kept)


def mask(rng: Rng) -> np.ndarray:
    return rng.random(16) < 0.4


def stream(source: Source, *, workers: int = 0, position: int = 0, window: int = 1,
           read_ahead: bool = True) -> BatchLoader:  # fmt: skip
    return train_loader(
        source=source, views=TwoViews(image_size=32, token_size=16), mask=mask, seed=3,
        batch_size=2, rank=0, world=1, position=position, window=window, workers=workers,
        read_ahead=read_ahead,
    )  # fmt: skip


def fingerprints(batches: Iterable[Batch], num: int = STEPS) -> list[tuple[int, str]]:
    """The number of each sample, and a hash of all its fields: both views, mask, label, ..."""
    found = []
    for batch in islice(batches, num):
        for number, *fields in zip(batch.index_B.tolist(), *batch, strict=True):
            content = b"".join(field.numpy().tobytes() for field in fields)
            found.append((number, hashlib.sha1(content).hexdigest()))
    return found


def test_a_remote_source_is_the_local_one(server: ShardServer, tmp_path: Path) -> None:
    local = ShardSource(shards=str(server.folder))
    remote = ShardSource(shards=addresses(server), cache_dir=tmp_path / "cache")
    assert remote.digest == local.digest and remote.classes == local.classes == [*"abcd"]
    assert remote.keys == local.keys and remote.groups.tolist() == local.groups.tolist()
    assert remote.labels.tolist() == local.labels.tolist()
    assert [name for name, _ in server.gets if name.endswith(".tar")] == []
    sent = pickle.loads(pickle.dumps(remote))  # to a spawned loader process
    for index in range(40):
        assert remote[index].image == sent[index].image == local[index].image
    assert remote[5].origin == f"{server.url('train-001.tar')} at byte {remote._offsets[5]}"


@pytest.mark.parametrize(("workers", "shards"), [(0, 3), (1, 4), (3, 6)])
def test_batches_are_those_of_the_local_folder_whatever_the_server_does(
    server: ShardServer, tmp_path: Path, workers: int, shards: int
) -> None:
    """A bound that holds `shards` of the ten, and a fault every other piece."""
    expected = fingerprints(stream(ShardSource(shards=str(server.folder)), workers=0))
    limit, cache, seen = largest(server.folder, shards), tmp_path / "cache", []

    def measure(handler, sent: bytes) -> None:
        seen.append(used(cache / "shards"))
        answer(handler, sent)

    faults = cycle([measure, drop, measure, truncate, None, status(503)])
    server.faults.extend(islice(faults, 5000))
    source = ShardSource(shards=addresses(server), cache_dir=cache, cache_gib=limit / GIB)
    found = fingerprints(stream(source, workers=workers))
    assert found == expected
    numbers = [number for number, _ in found]
    assert sorted(numbers[:40]) == sorted(numbers[40:80]) == list(range(40))
    assert max(seen) <= limit
    again = stream(source, workers=workers, position=26)
    assert fingerprints(again, num=STEPS - 13) == expected[26:]


def test_a_large_cache_fetches_every_shard_once(server: ShardServer, tmp_path: Path) -> None:
    source = ShardSource(shards=addresses(server), cache_dir=tmp_path / "cache")
    fingerprints(stream(source, workers=2))
    asked = [start for name in server.folder.glob("*.tar") for start in server.starts(name.name)]
    expected = [
        start
        for path in server.folder.glob("*.tar")
        for start in range(0, path.stat().st_size, PIECE)
    ]
    assert asked == expected


def test_a_cache_that_is_too_small_for_the_window_is_refused_at_once(
    server: ShardServer, tmp_path: Path
) -> None:
    """Two windows of two shards, and five positions of the loader: two shards more."""
    limit = largest(server.folder, 6)

    def source(limit: int) -> ShardSource:
        return ShardSource(
            shards=addresses(server), cache_dir=tmp_path / "cache", cache_gib=limit / GIB
        )

    message = r"too small.*by 6 shards at a time \(two windows of data\.window=2 shards"
    with pytest.raises(UserError, match=message) as caught:
        stream(source(limit - 1), workers=1, window=2)
    proposed = float(str(caught.value).partition("Set data.cache_gib=")[2].partition(" ")[0])
    assert limit <= proposed * GIB <= 1.02 * limit
    stream(source(limit), workers=1, window=2)
    stream(source(limit - 1), workers=1, window=2, read_ahead=False)  # another rank checks it
    with pytest.raises(UserError, match="by 10 shards at a time"):  # never more than there are
        stream(source(limit), workers=1, window=100)


def test_parts_of_sets_follow_the_same_shards(server: ShardServer, tmp_path: Path) -> None:
    """A mixture of a local set and a subset of a remote one."""
    (tmp_path / "other").mkdir()
    shutil.copy(server.folder / "train-009.tar", tmp_path / "other" / "one.tar")
    local = ShardSource(shards=str(tmp_path / "other"))
    names = [
        addresses(server).replace(f"{SHARDS - 1:03d}", "004"),
        str(server.folder / "*00[0-4].tar"),
    ]
    streams = []
    for name in names:
        part = SubsetSource(ShardSource(shards=name, cache_dir=tmp_path / "cache"), range(3, 20, 2))
        source = MixtureSource([Ingredient("a", local), Ingredient("b", part, weight=2.0)])
        streams.append(fingerprints(stream(source)))
        tars = [source.tar_of(index) for index in range(len(source))]
        assert [str(tar).rpartition("/")[2] for tar in tars] == ["one.tar"] * 4 + [
            f"train-{number // 4:03d}.tar" for number in range(3, 20, 2)
        ]
    assert streams[0] == streams[1]


def test_evaluation(server: ShardServer, tmp_path: Path) -> None:
    def evaluate(shards: str, *, workers: int) -> list[tuple[int, str]]:
        source = ShardSource(
            shards=shards,
            cache_dir=tmp_path / "cache",
            cache_gib=largest(server.folder, 1) / GIB,
        )
        loader = eval_loader(
            source=source, view=CenterView(image_size=16), mask=mask, seed=0, batch_size=8,
            rank=0, world=1, workers=workers,
        )  # fmt: skip
        return fingerprints(loader)

    expected = evaluate(str(server.folder), workers=0)
    assert len(expected) == 40
    assert evaluate(addresses(server), workers=0) == expected
    assert evaluate(addresses(server), workers=2) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_disappears_is_reported_when_it_is_needed(
    server: ShardServer, tmp_path: Path, workers: int
) -> None:
    source = ShardSource(shards=addresses(server), cache_dir=tmp_path / "cache")
    expected = fingerprints(stream(ShardSource(shards=str(server.folder))))
    last = next(number for number, _ in reversed(expected[:40])) // IN_SHARD
    (server.folder / f"train-{last:03d}.tar").unlink()
    found: list[Batch] = []
    with pytest.raises(UserError, match=rf"train-{last:03d}\.tar cannot be fetched.*404"):
        found.extend(stream(source, workers=workers))
    assert fingerprints(found) == expected[:36]


def test_make_shards_reads_from_a_server_too(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make_shards(str(server.folder), tmp_path / "local", samples_per_shard=20)
    remote = make_shards(
        addresses(server), tmp_path / "remote", samples_per_shard=20, cache_dir=tmp_path / "cache"
    )
    assert remote.num_samples == local.num_samples == 40
    for path in sorted((tmp_path / "local").glob("*.tar")):
        assert (tmp_path / "remote" / path.name).read_bytes() == path.read_bytes()
    small = partial(ShardSource, cache_gib=largest(server.folder, 9) / GIB)
    monkeypatch.setattr("mimkit.data.make_shards.ShardSource", small)
    with pytest.raises(UserError, match=r"too small.* by 10 shards at a time \(all, since"):
        make_shards(addresses(server), tmp_path / "other", cache_dir=tmp_path / "cache")


def test_a_member_too_long_for_an_image_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ShardSource(shards=str(folder))
    longest = int(source._sizes.argmax())
    monkeypatch.setattr("mimkit.data.sources.shards._MAX_BYTES", int(source._sizes.max()) - 1)
    read = [index for index in range(40) if source._sizes[index] < source._sizes[longest]]
    assert len(read) > 30 and all(source[index].image for index in read)
    with pytest.raises(DecodeError, match=rf"sample {longest}, .* has {source._sizes.max()} bytes"):
        source[longest]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:(moto|boto|botocore|werkzeug|s3fs).*")
def test_from_an_s3_server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                        "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://{host}:{port}",
                        }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        for path in folder.iterdir():
            client.upload_file(str(path), "bucket", f"set/{path.name}")
        name = f"s3://bucket/set/train-{{000..{SHARDS - 1:03d}}}.tar"
        monkeypatch.setattr(
            "mimkit.data.sources.shards.ShardCache", partial(ShardCache, piece=PIECE)
        )
        source = ShardSource(shards=name, cache_dir=tmp_path / "cache",
                             cache_gib=largest(folder, 6) / GIB)  # fmt: skip
        local = ShardSource(shards=str(folder))
        assert source.digest == local.digest and source.classes == [*"abcd"]
        expected = fingerprints(stream(local))
        for workers in (0, 2):
            assert fingerprints(stream(source, workers=workers)) == expected
        with pytest.raises(UserError, match=r"1 of 2 shards.*s3://bucket/set/b\.tar.*answers 404"):
            ShardSource(shards=["s3://bucket/set/train-000.tar", "s3://bucket/set/b.tar"],
                        cache_dir=tmp_path / "cache")  # fmt: skip
    finally:
        server.stop()


def test_a_copy_that_went_bad_is_named(server: ShardServer, tmp_path: Path) -> None:
    """The server's file is sound: whoever reads the message must learn of the copy."""
    source = ShardSource(shards=addresses(server), cache_dir=tmp_path / "cache")
    assert source[0].image
    tar = source.tar_of(0)
    assert tar.copy is not None and tar.copy.exists()
    start, size = int(source._offsets[0]), int(source._sizes[0])
    with tar.copy.open("r+b") as file:
        file.seek(start)
        file.write(bytes(size))
    loader = eval_loader(source=source, view=CenterView(image_size=16), mask=None, seed=0,
                         batch_size=1, rank=0, world=1, workers=0, limit=1)  # fmt: skip
    with pytest.raises(UserError, match=rf"read from its copy {tar.copy}: delete that"):
        list(loader)
