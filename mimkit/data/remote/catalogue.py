"""From addresses to shards that can be opened: servers are asked about many at once."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from mimkit.data.index import ShardIndex, make_index, save_index
from mimkit.data.remote.beside import RemoteFolder, fetch_index, kept_index, read_folder
from mimkit.data.remote.cache import REMEDY, ShardCache, fingerprint
from mimkit.data.remote.download import RemoteShard
from mimkit.data.remote.store import AbsentError, RemoteFile, look
from mimkit.data.remote.urls import parent, shown
from mimkit.data.tars import Tar
from mimkit.errors import UserError
from mimkit.files import disk_errors

Item = TypeVar("Item")
Result = TypeVar("Result")
_AT_ONCE = 16  # requests
_QUIET = 5  # seconds until progress is shown


@dataclass(frozen=True)
class RemoteTar(Tar):
    """A shard on a server, read from the cache.

    Args:
        indexed: fingerprint of its index.
    """

    shard: RemoteShard
    cache: ShardCache
    indexed: str
    folder: RemoteFolder

    def __str__(self) -> str:
        return str(self.shard)

    def open(self) -> int:
        return self.cache.open(self.shard, indexed=self.indexed)

    def bring_near(self, *, again: bool) -> None:
        os.close(self.open())

    @property
    def copy(self) -> Path | None:
        return self.cache.path(self.shard)

    @property
    def classes(self) -> list[str]:
        return self.folder.classes


def open_remote(urls: Sequence[str], *, cache: ShardCache) -> list[tuple[RemoteTar, ShardIndex]]:
    """The tars at `urls` and their indexes.

    An index comes from the cache, else from `SHARD.index.npz` beside the shard; where there is
    none that fits, the shard is fetched to make it.

    Raises:
        UserError: shards that are not there, larger than the cache, damaged, or not what
            manifest.json beside them says; a server that fails too often; a full disk.
    """
    if not urls:
        return []
    with disk_errors(cache.space.folder, REMEDY):
        cache.space.folder.mkdir(parents=True, exist_ok=True)
        files = _look_at_all(urls, cache)
        cache.space.check(max(file.size for file in files), why="by the largest shard alone")
        one_of = {parent(url): url for url in urls}
        folders = {p: read_folder(url, patience=cache.patience) for p, url in one_of.items()}
        shards = [folders[parent(file.url)].describe(file) for file in files]
        indexes = _find_indexes(shards, cache)
    return [
        (RemoteTar(shard, cache, fingerprint(index), folders[parent(shard.file.url)]), index)
        for shard, index in zip(shards, indexes, strict=True)
    ]


def check_room(tars: Iterable[Tar | None], *, num: int, why: str) -> None:
    """Raises UserError where the `num` largest of the remote ones do not fit into their cache.

    Args:
        why: so many are needed at once.
    """
    remote = [tar for tar in tars if isinstance(tar, RemoteTar)]
    if remote:
        sizes = sorted((tar.shard.file.size for tar in remote), reverse=True)[:num]
        space = remote[0].cache.space
        with disk_errors(space.folder, REMEDY):
            space.check(sum(sizes), why=f"by {len(sizes)} shards at a time ({why})",
                        fewer="; or data.window or engine.workers lower")  # fmt: skip


def _look_at_all(urls: Sequence[str], cache: ShardCache) -> list[RemoteFile]:
    def ask(url: str) -> RemoteFile | AbsentError:
        try:
            return cache.patience.insist(partial(look, url), what=f"looking at {shown(url)}")
        except AbsentError as error:
            return error

    found = _in_parallel(ask, urls, doing="sizes of shards")
    absent = [answer for answer in found if isinstance(answer, AbsentError)]
    if absent:
        raise UserError(f"{len(absent)} of {len(urls)} shards cannot be fetched: {absent[0]}")
    return [answer for answer in found if isinstance(answer, RemoteFile)]


def _find_indexes(shards: Sequence[RemoteShard], cache: ShardCache) -> list[ShardIndex]:
    found = _in_parallel(partial(_known_index, cache=cache), shards, doing="indexes of shards")
    lacking = [shard for shard, index in zip(shards, found, strict=True) if index is None]
    doing = "shards without an index beside them are fetched"
    made = iter(_in_parallel(partial(_make_index, cache=cache), lacking, doing=doing))
    return [next(made) if index is None else index for index in found]


def _known_index(shard: RemoteShard, *, cache: ShardCache) -> ShardIndex | None:
    path = cache.index_path(shard)
    kept = kept_index(shard, path)
    return fetch_index(shard, path, patience=cache.patience) if kept is None else kept


def _make_index(shard: RemoteShard, *, cache: ShardCache) -> ShardIndex:
    path = cache.index_path(shard)
    os.close(cache.open(shard, indexed=None))
    index = kept_index(shard, path)
    if index is None:  # the tar was there already, and somebody had removed its index
        index = make_index(cache.path(shard))
        save_index(index, path)
    return index


def _in_parallel(
    action: Callable[[Item], Result], items: Sequence[Item], *, doing: str
) -> list[Result]:
    """`action` of each item, in order; shows how far it is where it takes long."""
    if not items:
        return []
    interval = 0.1 if sys.stderr.isatty() else 10
    # its threads are daemons: Ctrl-C does not wait for what they are fetching
    with ThreadPool(min(_AT_ONCE, len(items))) as pool:
        return list(tqdm(pool.imap(action, items), total=len(items), desc=doing, delay=_QUIET,
                         mininterval=interval, file=sys.stderr))  # fmt: skip
