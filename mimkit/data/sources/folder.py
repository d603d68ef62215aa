"""Samples from a folder of images; for small sets, without making shards first."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import Sample
from mimkit.data.decode import DecodeError
from mimkit.data.image_folder import list_images, unique_keys
from mimkit.data.sources import SOURCES, Source


@SOURCES.register
class FolderSource(Source):
    """Images below `folder`, sorted by path; class subfolders, sorted by name, give the labels.

    Every image is a file of its own to open, and bad ones are found only when they are drawn: for
    large sets use tools/make_shards.py.

    Attributes:
        classes: names of the class subfolders, by label.

    Raises:
        UserError: see `list_images`.
    """

    def __init__(self, *, folder: str | Path) -> None:
        images = list_images(Path(folder).expanduser())
        self._classes = images.classes
        self._root, self._names = images.root, images.names
        self._keys = unique_keys(images.names)
        self._labels = np.array(images.labels, np.int64)
        digest = hashlib.blake2b(digest_size=16)
        for name, label in zip(images.names, images.labels, strict=True):
            line = f"{name} {_size(self._root / name)} {label}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            image = Path(self.origin(index)).read_bytes()
        except OSError as error:
            cause = error.strerror or str(error)
            raise DecodeError(f"{self.origin(index)} cannot be read: {cause}") from error
        label = int(self._labels[index])
        return Sample(index, self._keys[index], image, label, origin=self.origin(index))

    def origin(self, index: int) -> str:
        """The path of sample `index`."""
        return str(self._root / self._names[index])

    @property
    def keys(self) -> list[str]:
        return self._keys

    @property
    def classes(self) -> list[str]:
        return self._classes

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def labels(self) -> NDArray[np.int64]:
        return self._labels


def _size(path: Path) -> int:
    """In bytes; -1 for a link to nowhere, which is a bad sample like other bad ones."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
