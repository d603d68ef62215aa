"""Samples from WebDataset tars, by number: an index and `pread`, no stream."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import Sample
from mimkit.data.decode import MAX_PIXELS, DecodeError
from mimkit.data.index import ShardIndex, load_index
from mimkit.data.patterns import expand_places
from mimkit.data.remote.cache import ShardCache
from mimkit.data.remote.catalogue import open_remote
from mimkit.data.remote.space import GIB, Space
from mimkit.data.sources import SOURCES, Source
from mimkit.data.tars import LocalTar, OpenTars, Tar
from mimkit.errors import UserError

_MAX_BYTES = 4 * MAX_PIXELS  # the largest image that is decoded, with alpha and not compressed
_MAX_OPEN = 64  # files a process; many systems allow 1024, and windows hold a few shards


@SOURCES.register
class ShardSource(Source):
    """The samples of a list of tars, numbered in the order in which they lie there.

    Args:
        shards: a tar, a folder of tars, a glob, a brace pattern, an address or a brace pattern of
            addresses (https, s3, ...), or a list of these.
        cache_dir: where indexes go if the folder of the shards is read-only, and, below
            cache_dir/shards, what is fetched from servers.
        cache_gib: bound of what is fetched, in GiB; None for that of the disk.
        unique: refuse keys that two samples share, which other programs would mix up.

    Attributes:
        shards: paths and addresses of the tars.
        tars: the same, as what can be opened.
        num_without_image: keys without an image in them, which are no samples.

    Raises:
        UserError: no shards, missing or damaged ones (see `expand_places`, `load_index` and
            `open_remote`), or a key that two samples share.
    """

    def __init__(
        self,
        *,
        shards: str | Sequence[str],
        cache_dir: str | Path = "~/.cache/mimkit",
        cache_gib: float | None = 64.0,
        unique: bool = True,
    ) -> None:
        folder = Path(cache_dir).expanduser()
        self.shards = expand_places(shards)
        opened = _open(self.shards, folder, cache_gib)
        self.tars, indexes = [tar for tar, _ in opened], [index for _, index in opened]
        self._keys = np.concatenate([index.keys for index in indexes])
        self._offsets = np.concatenate([index.offsets for index in indexes])
        self._sizes = np.concatenate([index.sizes for index in indexes])
        self._labels = np.concatenate([index.labels for index in indexes])
        self._starts = np.cumsum([0, *(len(index) for index in indexes)], dtype=np.int64)
        self.num_without_image = sum(index.num_without_image for index in indexes)
        if unique:
            self._check_unique()
        self._digest = _digest(self._keys, self._sizes, self._labels)
        self._open = OpenTars()

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = self._shard(index)
        tar, key = self.tars[number], self._keys[index].decode()
        offset, size = int(self._offsets[index]), int(self._sizes[index])
        if size > _MAX_BYTES:
            raise DecodeError(
                f"sample {index}, key '{key}', in {self.origin(index)}, has {size} bytes and is "
                f"not read; an image has at most {_MAX_BYTES}"
            )
        try:
            image = os.pread(self._open.open(number, tar, most=_MAX_OPEN), size, offset)
        except OSError as error:
            raise UserError(f"{tar} cannot be read: {error.strerror or error}.") from error
        if len(image) != size:
            raise UserError(
                f"{tar}: only {len(image)} of the {size} bytes of sample '{key}' could be read "
                f"at byte {offset}; the file was cut after it was indexed."
            )
        label = int(self._labels[index])
        return Sample(index, key, image, label, origin=self.origin(index))

    @property
    def keys(self) -> list[str]:
        """Of all samples, in order."""
        return [key.decode() for key in self._keys.tolist()]

    def origin(self, index: int) -> str:
        """Where sample `index` lies, for messages."""
        return f"{self.tar_of(index)} at byte {self._offsets[index]}"

    def tar_of(self, index: int) -> Tar:
        return self.tars[self._shard(index)]

    def _shard(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, "right")) - 1

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def labels(self) -> NDArray[np.int64]:
        return self._labels

    @property
    def classes(self) -> list[str]:
        """From classes.json beside the first shard, as make_shards writes it."""
        return self.tars[0].classes

    @property
    def groups(self) -> NDArray[np.int64]:
        return self._starts

    def _check_unique(self) -> None:
        keys = self._keys.tolist()
        if len(set(keys)) == len(keys):
            return
        first: dict[bytes, int] = {}
        for number, key in enumerate(keys):
            if key in first:
                raise UserError(
                    f"the key '{key.decode()}' is in {self.tar_of(first[key])} and again in "
                    f"{self.tar_of(number)}; keys must be unique over all shards. Leave one of "
                    "them out, or write the set again with tools/make_shards.py."
                )
            first[key] = number


def _digest(keys: NDArray[np.bytes_], sizes: NDArray[np.int64], labels: NDArray[np.int64]) -> str:
    """blake2b over every key, image size and label, in order; shard bounds do not enter."""
    digest = hashlib.blake2b(b"\n".join(keys.tolist()), digest_size=16)
    digest.update(sizes.astype("<i8").tobytes())
    digest.update(labels.astype("<i8").tobytes())
    return digest.hexdigest()


def _open(
    places: Sequence[Path | str], cache_dir: Path, cache_gib: float | None
) -> list[tuple[Tar, ShardIndex]]:
    """Every shard and its index; addresses are those that are no paths."""
    limit = None if cache_gib is None else int(cache_gib * GIB)
    cache = ShardCache(space=Space(folder=cache_dir / "shards", limit=limit))
    remote = iter(open_remote([place for place in places if isinstance(place, str)], cache=cache))
    return [
        next(remote) if isinstance(place, str) else _open_local(place, cache_dir)
        for place in places
    ]


def _open_local(path: Path, cache_dir: Path) -> tuple[Tar, ShardIndex]:
    index = load_index(path, cache_dir=cache_dir)
    return LocalTar(path, index.tar_size, index.tar_mtime_ns), index
