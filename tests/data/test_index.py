"""The index: built once, fresh, checked against the manifest."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import webdataset
from test_tar import pack

from mimkit.batch import NO_LABEL
from mimkit.data import index as index_module
from mimkit.data.index import index_path, load_index, make_index
from mimkit.errors import UserError
from mimkit.files import sha256


@pytest.fixture
def shard(tmp_path: Path, jpegs: list[bytes]) -> Path:
    """Written by webdataset itself: labels in .cls, in .json, and none."""
    path = tmp_path / "s.tar"
    with webdataset.TarWriter(str(path)) as tar:
        tar.write({"__key__": "n/a", "jpg": jpegs[0], "cls": 7})
        tar.write({"__key__": "n/b", "jpeg": jpegs[1], "json": {"label": 3, "caption": "x"}})
        tar.write({"__key__": "n/c", "png": jpegs[2], "json": {"label": "cat"}, "txt": "c"})
        tar.write({"__key__": "n/d", "txt": "no image"})
    return path


def test_what_webdataset_wrote(shard: Path, tmp_path: Path, jpegs: list[bytes]) -> None:
    index = load_index(shard, cache_dir=tmp_path)
    assert index.keys.tolist() == [b"n/a", b"n/b", b"n/c"]
    assert index.extensions.tolist() == [b"jpg", b"jpeg", b"png"]
    assert index.labels.tolist() == [7, 3, NO_LABEL]
    assert index.num_without_image == 1
    content = shard.read_bytes()
    for offset, size, jpeg in zip(index.offsets, index.sizes, jpegs, strict=False):
        assert content[offset : offset + size] == jpeg


def test_it_is_read_back(shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_index(shard, cache_dir=tmp_path)
    assert index_path(shard).exists()
    monkeypatch.setattr(index_module, "make_index", lambda _: pytest.fail("scanned again"))
    again = load_index(shard, cache_dir=tmp_path)
    for name, value in vars(first).items():
        np.testing.assert_array_equal(value, getattr(again, name))


def test_a_stale_or_damaged_index_is_made_again(
    shard: Path, tmp_path: Path, jpegs: list[bytes]
) -> None:
    load_index(shard, cache_dir=tmp_path)
    with webdataset.TarWriter(str(shard)) as tar:
        tar.write({"__key__": "new", "jpg": jpegs[3], "cls": 1})
    assert load_index(shard, cache_dir=tmp_path).keys.tolist() == [b"new"]
    index_path(shard).write_bytes(b"PK\x03\x04 half an index")
    assert load_index(shard, cache_dir=tmp_path).keys.tolist() == [b"new"]
    os.utime(shard, ns=(1, 1))
    assert load_index(shard, cache_dir=tmp_path).tar_mtime_ns == 1


def test_a_read_only_folder_uses_the_cache(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, cache = index_module.save_index, tmp_path / "cache"

    def save_below_cache(index: index_module.ShardIndex, path: Path) -> None:
        if cache not in path.parents:
            raise PermissionError(13, "Permission denied")
        save(index, path)

    monkeypatch.setattr(index_module, "save_index", save_below_cache)
    load_index(shard, cache_dir=cache)
    assert not index_path(shard).exists()
    assert len(list((cache / "index").iterdir())) == 1
    monkeypatch.setattr(index_module, "make_index", lambda _: pytest.fail("scanned again"))
    assert len(load_index(shard, cache_dir=cache)) == 3


def test_no_place_for_the_index(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(index: index_module.ShardIndex, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_module, "save_index", full)
    with pytest.raises(UserError, match="No space left"):
        load_index(shard, cache_dir=tmp_path)


def test_the_manifest_is_believed(shard: Path, tmp_path: Path) -> None:
    entry = {"shard": shard.name, "samples": 3, "sha256": sha256(shard)}
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"shards": [entry]}))
    load_index(shard, cache_dir=tmp_path)

    index_path(shard).unlink()
    manifest.write_text(json.dumps({"shards": [{**entry, "samples": 4}]}))
    with pytest.raises(UserError, match=r"holds 3 images, but manifest\.json beside it says 4"):
        load_index(shard, cache_dir=tmp_path)
    manifest.write_text(json.dumps({"shards": [{**entry, "sha256": "0" * 64}]}))
    with pytest.raises(UserError, match="bad checksum"):
        load_index(shard, cache_dir=tmp_path)
    assert not index_path(shard).exists()


def test_a_manifest_of_another_kind_says_nothing(shard: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')
    assert len(load_index(shard, cache_dir=tmp_path)) == 3


def test_shards_without_images_say_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no image.*found \.gif, \.txt"):
        make_index(pack(tmp_path / "a.tar", ["a.txt", "b.gif"]))
    with pytest.raises(UserError, match="first dot"):
        make_index(pack(tmp_path / "a.tar", ["a.1.jpg", "b.1.jpg"]))


def test_a_label_that_is_no_number(tmp_path: Path, jpegs: list[bytes]) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as tar:
        tar.write({"__key__": "a", "jpg": jpegs[0], "cls": b"cat"})
    with pytest.raises(UserError, match=r"'a\.cls' is b'cat'"):
        make_index(tmp_path / "a.tar")
