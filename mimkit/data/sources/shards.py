"""Samples from WebDataset tars, by number: an index and `pread`, no stream."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import Sample
from mimkit.data.index import load_index
from mimkit.data.manifest import read_classes
from mimkit.data.patterns import expand_shards
from mimkit.data.sources import SOURCES, Source
from mimkit.errors import UserError

_MAX_OPEN = 64  # files a process; many systems allow 1024, and windows hold a few shards


@SOURCES.register
class ShardSource(Source):
    """The samples of a list of tars, numbered in the order in which they lie there.

    Args:
        shards: a tar, a folder of tars, a glob, a brace pattern, or a list of these.
        cache_dir: where indexes go if the folder of the shards is read-only.
        unique: refuse keys that two samples share, which other programs would mix up.

    Attributes:
        shards: the tars.
        num_without_image: keys without an image in them, which are no samples.

    Raises:
        UserError: no shards, missing or damaged ones (see `expand_shards` and `load_index`), or a
            key that two samples share.
    """

    def __init__(
        self,
        *,
        shards: str | Sequence[str],
        cache_dir: str | Path = "~/.cache/mimkit",
        unique: bool = True,
    ) -> None:
        self.shards = expand_shards(shards)
        folder = Path(cache_dir).expanduser()
        indexes = [load_index(shard, cache_dir=folder) for shard in self.shards]
        self._keys = np.concatenate([index.keys for index in indexes])
        self._offsets = np.concatenate([index.offsets for index in indexes])
        self._sizes = np.concatenate([index.sizes for index in indexes])
        self._labels = np.concatenate([index.labels for index in indexes])
        self._starts = np.cumsum([0, *(len(index) for index in indexes)], dtype=np.int64)
        self.num_without_image = sum(index.num_without_image for index in indexes)
        if unique:
            self._check_unique()
        self._digest = _digest(self._keys, self._sizes, self._labels)
        self._tars = [(index.tar_size, index.tar_mtime_ns) for index in indexes]
        self._files = _OpenFiles()

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self._starts, index, "right")) - 1
        path, key = self.shards[shard], self._keys[index].decode()
        offset, size = int(self._offsets[index]), int(self._sizes[index])
        try:
            image = os.pread(self._files.open(path, self._tars[shard]), size, offset)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
        if len(image) != size:
            raise UserError(
                f"{path}: only {len(image)} of the {size} bytes of sample '{key}' could be read "
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
        shard = int(np.searchsorted(self._starts, index, "right")) - 1
        return f"{self.shards[shard]} at byte {self._offsets[index]}"

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def labels(self) -> NDArray[np.int64]:
        return self._labels

    @property
    def classes(self) -> list[str]:
        """From classes.json beside the first shard, as make_shards writes it."""
        return read_classes(self.shards[0].parent)

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
                one, other = np.searchsorted(self._starts, [first[key], number], "right") - 1
                raise UserError(
                    f"the key '{key.decode()}' is in {self.shards[one]} and again in "
                    f"{self.shards[other]}; keys must be unique over all shards. Leave one of them "
                    "out, or write the set again with tools/make_shards.py."
                )
            first[key] = number


def _digest(keys: NDArray[np.bytes_], sizes: NDArray[np.int64], labels: NDArray[np.int64]) -> str:
    """blake2b over every key, image size and label, in order; shard bounds do not enter."""
    digest = hashlib.blake2b(b"\n".join(keys.tolist()), digest_size=16)
    digest.update(sizes.astype("<i8").tobytes())
    digest.update(labels.astype("<i8").tobytes())
    return digest.hexdigest()


class _OpenFiles:
    """File descriptors, opened when first used, the least used closed; each process has its own."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._fds: OrderedDict[Path, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_owner": 0, "_fds": OrderedDict()}

    def open(self, path: Path, indexed: tuple[int, int]) -> int:
        """A descriptor of `path`, whose size and mtime must be those that were indexed."""
        if self._owner != os.getpid():  # a fork: its parent closes what it opened
            self._owner, self._fds = os.getpid(), OrderedDict()
        if path not in self._fds:
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(self._fds[path])
            if (status.st_size, status.st_mtime_ns) != indexed:
                raise UserError(f"{path} was changed while it was in use; start again.")
            if len(self._fds) > _MAX_OPEN:
                os.close(self._fds.popitem(last=False)[1])
        self._fds.move_to_end(path)
        return self._fds[path]

    def __del__(self) -> None:
        if self._owner == os.getpid():
            for fd in self._fds.values():
                os.close(fd)
