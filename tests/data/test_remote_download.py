"""What a server does wrong, and what becomes of it."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shard_server import (
    PIECE,
    ShardServer,
    compress,
    drop,
    flip,
    make_cache,
    serving,
    status,
    truncate,
)

from mimkit.data.remote.catalogue import RemoteTar, open_remote
from mimkit.data.writer import ShardRecord, write_manifest
from mimkit.errors import UserError
from mimkit.files import sha256

NAME = "train-00000.tar"


@pytest.fixture
def server(shard_folder: Path) -> Iterator[ShardServer]:
    with serving(shard_folder) as server:
        yield server


@pytest.fixture
def tar(server: ShardServer, tmp_path: Path) -> RemoteTar:
    """The first shard, of which only the index has been fetched."""
    (opened, _), *_ = open_remote([server.url(NAME)], cache=make_cache(tmp_path / "cache"))
    assert server.starts(NAME) == []
    return opened


def content(tar: RemoteTar) -> bytes:
    descriptor = tar.open()
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def cached(tar: RemoteTar) -> list[str]:
    """Names of tars and parts of tars in the cache."""
    folder = tar.cache.space.folder
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".tar", ".part"))


def pieces(folder: Path) -> list[int]:
    return list(range(0, (folder / NAME).stat().st_size, PIECE))


def test_a_shard_is_fetched_piece_by_piece_once(tar: RemoteTar, server: ShardServer) -> None:
    whole = (server.folder / NAME).read_bytes()
    assert content(tar) == whole == content(tar)
    assert server.starts(NAME) == pieces(server.folder)
    assert len(pieces(server.folder)) >= 5
    assert cached(tar) == [tar.cache.path(tar.shard).name]
    assert tar.cache.path(tar.shard).read_bytes() == whole


@pytest.mark.parametrize("fault", [drop, truncate, status(500), status(503), status(429)])
def test_what_passes_is_tried_again_where_it_stopped(
    tar: RemoteTar, server: ShardServer, fault
) -> None:
    server.faults.extend([None, fault, fault, None, fault])
    assert content(tar) == (server.folder / NAME).read_bytes()
    first, second, third, *rest = pieces(server.folder)
    assert server.starts(NAME) == [first, second, second, second, third, third, *rest]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (drop, "ContentLengthError|ClientPayloadError"),
        (truncate, f"{PIECE // 2} bytes came where {PIECE} were asked for"),
        (status(500), "500"),
    ],
)
def test_what_does_not_pass_ends_with_how_often_and_why(
    tar: RemoteTar, server: ShardServer, fault, cause: str
) -> None:
    server.faults.extend([None] + [fault] * 3)
    with pytest.raises(UserError, match=rf"{server.url(NAME)} failed 3 times.*({cause})"):
        tar.open()
    assert server.starts(NAME) == [0, PIECE, PIECE, PIECE]
    assert content(tar) == (server.folder / NAME).read_bytes()  # a later start
    assert server.starts(NAME)[4:] == pieces(server.folder)[1:]


@pytest.mark.parametrize("code", [401, 403, 404, 400])
def test_a_refusal_is_final(tar: RemoteTar, server: ShardServer, code: int) -> None:
    server.faults.append(status(code))
    with pytest.raises(UserError, match=rf"{server.url(NAME)} cannot be fetched: .* {code}"):
        tar.open()
    assert len(server.starts(NAME)) == 1


def test_shards_that_are_not_there_are_counted_at_the_start(
    server: ShardServer, tmp_path: Path
) -> None:
    urls = [server.url(f"train-0000{number}.tar") for number in range(5)]
    with pytest.raises(
        UserError, match=r"^2 of 5 shards .*train-00003\.tar .* answers 404\. Check"
    ):
        open_remote(urls, cache=make_cache(tmp_path / "cache"))


def test_nobody_answers(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/a.tar"
        with pytest.raises(UserError, match=rf"looking at {url} failed 2 times.*Connect"):
            open_remote([url], cache=make_cache(tmp_path / "cache", tries=2))


def test_a_server_that_packs_what_it_sends_is_asked_not_to(
    tar: RemoteTar, server: ShardServer
) -> None:
    server.faults.append(compress)
    assert content(tar) == (server.folder / NAME).read_bytes()
    assert server.starts(NAME) == pieces(server.folder)


def test_a_server_that_only_sends_whole_files(tar: RemoteTar, server: ShardServer) -> None:
    server.ranges = False
    assert content(tar) == (server.folder / NAME).read_bytes()
    assert server.starts(NAME) == [0]


def test_a_whole_file_completes_what_was_begun(tar: RemoteTar, server: ShardServer) -> None:
    server.faults.extend([None, None, status(404)])
    with pytest.raises(UserError, match="404"):
        tar.open()
    server.ranges = False
    assert content(tar) == (server.folder / NAME).read_bytes()
    assert server.starts(NAME)[3:] == [2 * PIECE]


def test_a_shard_that_is_replaced_while_it_is_fetched(tar: RemoteTar, server: ShardServer) -> None:
    old = server.version(server.folder / NAME)

    def replace(handler, sent: bytes) -> None:
        path = server.folder / NAME
        path.write_bytes((server.folder / "train-00002.tar").read_bytes()[: path.stat().st_size])
        status(500)(handler, sent)

    server.faults.extend([None, None, replace])
    with pytest.raises(UserError, match=f'replaced on its server.*"{old}".*Start again'):
        tar.open()
    assert cached(tar) == []


def with_manifest(server: ShardServer, **changed) -> None:
    path = server.folder / NAME
    record = ShardRecord(NAME, "train", 7, path.stat().st_size, sha256(path))
    record = ShardRecord(**{**vars(record), **changed})
    write_manifest(server.folder, [record], source="test", classes=["cat", "dog"], settings={})


def test_the_manifest_is_believed(server: ShardServer, tmp_path: Path) -> None:
    with_manifest(server)
    (good, _), *_ = open_remote([server.url(NAME)], cache=make_cache(tmp_path / "a"))
    assert good.classes == ["cat", "dog"]
    (server.folder / "classes.json").write_text('["cat", "d')
    (cut, _), *_ = open_remote([server.url(NAME)], cache=make_cache(tmp_path / "a"))
    with pytest.raises(UserError, match=r"127.*classes\.json does not name the classes"):
        _ = cut.classes
    assert content(good) == (server.folder / NAME).read_bytes()
    with_manifest(server, sha256="0" * 64)
    (bad, _), *_ = open_remote([server.url(NAME)], cache=make_cache(tmp_path / "b"))
    with pytest.raises(UserError, match=r"bad checksum.*000000.*correct the manifest"):
        bad.open()
    with_manifest(server, samples=6)
    (bad, _), *_ = open_remote([server.url(NAME)], cache=make_cache(tmp_path / "c"))
    with pytest.raises(UserError, match=r"holds 7 images, but manifest\.json beside it says 6"):
        bad.open()
    assert cached(bad) == []
    (server.folder / "manifest.json").write_text('{"shards": [')
    with pytest.raises(UserError, match=r"manifest\.json is no JSON"):
        open_remote([server.url(NAME)], cache=make_cache(tmp_path / "d"))


def test_bytes_that_changed_on_the_way_are_fetched_again(
    server: ShardServer, tmp_path: Path
) -> None:
    with_manifest(server)
    (tar, _), *_ = open_remote([server.url(NAME)], cache=make_cache(tmp_path / "cache"))
    server.faults.extend([None, flip])
    assert content(tar) == (server.folder / NAME).read_bytes()
    assert server.starts(NAME) == pieces(server.folder) * 2


def test_without_an_index_on_the_server_the_shard_is_fetched_to_make_it(
    server: ShardServer, tmp_path: Path
) -> None:
    cache = make_cache(tmp_path / "cache")
    expected = open_remote([server.url(NAME)], cache=cache)[0][1]
    (server.folder / f"{NAME}.index.npz").unlink()
    cache = make_cache(tmp_path / "other")
    found = open_remote([server.url(NAME)], cache=cache)[0][1]
    assert server.starts(NAME) == pieces(server.folder)
    for name in ("keys", "offsets", "sizes", "labels"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    tar = open_remote([server.url(NAME)], cache=cache)[0][0]
    tar.cache.path(tar.shard).unlink()  # evicted; its index stays
    open_remote([server.url(NAME)], cache=cache)
    assert server.starts(NAME) == pieces(server.folder)


def index_of_another(server: ShardServer) -> None:
    """Fits in size, but says that the first sample lies elsewhere."""
    path = server.folder / f"{NAME}.index.npz"
    with np.load(path) as arrays:
        fields = dict(arrays)
    fields["offsets"] = np.roll(fields["offsets"], 1)
    fields["sizes"] = np.full_like(fields["sizes"], 9)
    np.savez(path, **fields)


def test_an_index_of_another_tar_is_found_out_before_a_sample_is_read(
    server: ShardServer, tmp_path: Path
) -> None:
    index_of_another(server)
    cache = make_cache(tmp_path / "cache")
    (tar, _), *_ = open_remote([server.url(NAME)], cache=cache)
    with pytest.raises(UserError, match=rf"not hold what its index says.*Remove .*{NAME}\.index"):
        tar.open()
    assert cached(tar) == [] and not cache.index_path(tar.shard).exists()
    (server.folder / f"{NAME}.index.npz").unlink()
    (tar, _), *_ = open_remote([server.url(NAME)], cache=cache)
    assert content(tar) == (server.folder / NAME).read_bytes()


def compressed(path: Path) -> None:
    with np.load(path) as arrays:
        np.savez_compressed(path, **dict(arrays))


def out_of_bounds(path: Path) -> None:
    with np.load(path) as arrays:
        fields = dict(arrays)
    fields["sizes"] = fields["sizes"] + 10**9
    np.savez(path, **fields)


def of_another_size(path: Path) -> None:
    with np.load(path) as arrays:
        fields = dict(arrays)
    fields["tar_size"] = fields["tar_size"] - 512
    fields["sizes"] = fields["sizes"] * 0
    np.savez(path, **fields)


def no_images(path: Path) -> None:
    with np.load(path) as arrays:
        fields = dict(arrays)
    fields["extensions"] = np.full(7, b"pkl")
    np.savez(path, **fields)


def text(path: Path) -> None:
    path.write_text("<html>not found</html>")


@pytest.mark.parametrize("spoil", [compressed, out_of_bounds, of_another_size, no_images, text])
def test_an_index_that_cannot_be_right_is_made_again(
    server: ShardServer, tmp_path: Path, spoil
) -> None:
    spoil(server.folder / f"{NAME}.index.npz")
    (tar, index), *_ = open_remote([server.url(NAME)], cache=make_cache(tmp_path / "cache"))
    assert index.labels.tolist() == list(range(7))
    assert server.starts(NAME) == pieces(server.folder)
    assert content(tar) == (server.folder / NAME).read_bytes()


def test_a_damaged_tar_is_named_by_its_address(server: ShardServer, tmp_path: Path) -> None:
    os.truncate(server.folder / NAME, 5000)
    with pytest.raises(UserError, match=rf"^{server.url(NAME)} is cut short: .*runs past the end"):
        open_remote([server.url(NAME)], cache=make_cache(tmp_path / "cache"))
