"""The source over tars, and what a user may write for `shards`."""

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from mimkit.batch import NO_LABEL
from mimkit.data.patterns import expand_shards
from mimkit.data.sources.folder import FolderSource
from mimkit.data.sources.shards import ShardSource
from mimkit.data.writer import Item, write_shard
from mimkit.errors import UserError


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_samples_by_number(shard_folder: Path, jpegs: list[bytes]) -> None:
    source = ShardSource(shards=str(shard_folder))
    assert len(source) == 20
    assert source.groups.tolist() == [0, 7, 12, 20]
    assert source.labels.tolist() == list(range(20))
    for index in np.random.default_rng(0).permutation(20).tolist():
        sample = source[index]
        assert (sample.index, sample.key, sample.label) == (index, f"cat/{index:03d}", index)
        assert sample.image == jpegs[index]
    assert source[12].origin == f"{shard_folder / 'train-00002.tar'} at byte 1536"  # after its .cls
    with pytest.raises(IndexError):
        source[20]


def test_it_travels_to_other_processes(shard_folder: Path) -> None:
    source = ShardSource(shards=str(shard_folder))
    before = source[3].image
    assert pickle.loads(pickle.dumps(source))[3].image == before
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"1" if source[3].image == before else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)
    assert source[3].image == before


def test_few_files_are_open_at_once(
    shard_folder: Path, monkeypatch: pytest.MonkeyPatch, jpegs: list[bytes]
) -> None:
    monkeypatch.setattr("mimkit.data.sources.shards._MAX_OPEN", 1)
    source = ShardSource(shards=str(shard_folder))
    before = num_open()
    assert [source[i].image for i in (0, 19, 8, 1, 12)] == [jpegs[i] for i in (0, 19, 8, 1, 12)]
    assert num_open() == before + 1


def test_the_digest_is_of_keys_sizes_and_labels(
    shard_folder: Path, tmp_path: Path, jpegs: list[bytes]
) -> None:
    digest = ShardSource(shards=str(shard_folder)).digest
    moved = shutil.copytree(shard_folder, tmp_path / "moved")
    assert ShardSource(shards=str(moved)).digest == digest
    one = tmp_path / "one.tar"
    items = [Item(f"cat/{i:03d}", jpegs[i], "jpg", i) for i in range(20)]
    write_shard(one, items, split="train")
    assert ShardSource(shards=str(one)).digest == digest
    other = tmp_path / "other.tar"
    write_shard(other, [*items[:19], items[19]._replace(label=NO_LABEL)], split="train")
    assert ShardSource(shards=str(other)).digest != digest


def test_a_key_in_two_shards(shard_folder: Path, tmp_path: Path) -> None:
    other = shutil.copy(shard_folder / "train-00001.tar", tmp_path / "again.tar")
    with pytest.raises(UserError, match=r"'cat/007' is in .*train-00001\.tar and again in .*again"):
        ShardSource(shards=[str(shard_folder), str(other)])


def test_a_shard_that_shrinks_or_changes_under_us(shard_folder: Path) -> None:
    source = ShardSource(shards=str(shard_folder))
    path = source.shards[0]
    source[0]
    os.truncate(path, 2000)
    with pytest.raises(UserError, match=r"only \d+ of the \d+ bytes of sample 'cat/006'"):
        source[6]
    with pytest.raises(UserError, match="changed while it was in use"):
        pickle.loads(pickle.dumps(source))[0]


def test_patterns(shard_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = ["train-00000.tar", "train-00001.tar", "train-00002.tar"]
    assert names(expand_shards(str(shard_folder))) == every
    assert names(expand_shards(f"{shard_folder}/train-{{00000..00002}}.tar")) == every
    assert names(expand_shards(f"{shard_folder}/*-0000[02].tar")) == [every[0], every[2]]
    assert names(expand_shards([f"{shard_folder}/{every[2]}", f"{shard_folder}/{every[0]}"])) == [
        every[2],
        every[0],
    ]
    monkeypatch.chdir(shard_folder.parent)
    assert names(expand_shards("shards")) == every


@pytest.mark.parametrize("name", ["a{1,2}.tar", "a[1].tar", "a#b?.tar"])
def test_a_path_that_exists_is_taken_as_it_is(shard_folder: Path, name: str) -> None:
    shutil.copy(shard_folder / "train-00000.tar", shard_folder / name)
    assert names(expand_shards(str(shard_folder / name))) == [name]


def test_missing_shards_are_named_at_once(shard_folder: Path) -> None:
    with pytest.raises(UserError, match=r"2 of 5 shards.*train-00003\.tar, .*train-00004\.tar"):
        expand_shards(f"{shard_folder}/train-{{00000..00004}}.tar")


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("", "is empty"),
        ([], "is empty"),
        ("s3://bucket/a.tar", "no local path"),
        ("pipe:cat a.tar", "no local path"),
        ("a.tar::pipe:true", "no local path"),
        ("train-{000..002.tar", "braces"),
        ("nowhere/*.tar", "There is no folder nowhere"),
    ],
)
def test_what_is_refused(shards: str | list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand_shards(shards)


def test_compressed_neighbours_are_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar.gz").write_bytes(b"\x1f\x8b")
    for pattern in (str(tmp_path), f"{tmp_path}/*.tar", f"{tmp_path}/train-0.tar"):
        with pytest.raises(UserError, match=rf"gunzip -k {tmp_path}/\*\.gz"):
            expand_shards(pattern)


def test_a_tar_named_twice(shard_folder: Path) -> None:
    with pytest.raises(UserError, match="more than once"):
        expand_shards([str(shard_folder), f"{shard_folder}/train-00000.tar"])


def test_a_folder_of_images(tmp_path: Path, jpegs: list[bytes]) -> None:
    for name in ("dog/1.jpg", "dog/more/2.JPEG", "cat/1.jpg", "cat/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(jpegs[len(name)])
    source = FolderSource(folder=tmp_path)
    assert [(source[i].key, source[i].label) for i in range(3)] == [
        ("cat/1", 0),
        ("dog/1", 1),
        ("dog/more/2", 1),
    ]
    assert source.classes == ["cat", "dog"]
    assert source[0].image == jpegs[len("cat/1.jpg")]
    assert source.digest == FolderSource(folder=tmp_path).digest
    (tmp_path / "loose.jpg").write_bytes(jpegs[0])
    with pytest.raises(UserError, match="holds 1 images itself"):
        FolderSource(folder=tmp_path)
    with pytest.raises(UserError, match="holds no image"):
        FolderSource(folder=shutil.copytree(tmp_path / "cat", tmp_path / "x", ignore=only_text))


def only_text(_: str, files: list[str]) -> list[str]:
    return [name for name in files if not name.endswith(".txt")]
