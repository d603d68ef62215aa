"""The images of all sound tars of a set, numbered as training numbers them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mimkit.audit._shard_files import ExaminedTar
from mimkit.audit._shard_findings import Finding
from mimkit.audit._shard_records import Image
from mimkit.batch import NO_LABEL
from mimkit.errors import UserError


@dataclass(frozen=True, eq=False)
class Samples:
    """Images by number.

    Attributes:
        tars: the sound ones.
        images: of all of them, in order.
        groups: bounds of the tars, 0, ..., len; see `Source.groups`.
        labels: one each; NO_LABEL where there is none that can be read.
    """

    tars: tuple[Path, ...]
    images: tuple[Image, ...]
    groups: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.images)

    def tar_of(self, number: int) -> Path:
        return self.tars[int(np.searchsorted(self.groups, number, "right")) - 1]

    def finding(self, number: int, kind: str, detail: str, *, count: int = 1) -> Finding:
        """Something about the image `number`."""
        image, tar = self.images[number], str(self.tar_of(number))
        return Finding(kind, tar, image.key, image.offset, detail, count)

    def among(self, chosen: NDArray[np.bool_], kind: str, detail: str) -> Iterator[Finding]:
        """One finding about all the chosen images, at the place of the first; none without any."""
        numbers = np.flatnonzero(chosen)
        if len(numbers):
            yield self.finding(int(numbers[0]), kind, detail, count=len(numbers))

    def read(self, number: int) -> bytes:
        """The encoded image. Raises OSError, or UserError where the tar is shorter by now."""
        image = self.images[number]
        with self.tar_of(number).open("rb", buffering=0) as file:
            file.seek(image.offset)
            content = file.read(image.size)
        if len(content) != image.size:
            raise UserError(f"only {len(content)} of {image.size} bytes: the tar was cut meanwhile")
        return content

    def duplicate_keys(self) -> Iterator[Finding]:
        """Keys of more than one tar. (Within a tar the scan finds them.)"""
        first: dict[str, int] = {}
        for number, image in enumerate(self.images):
            earlier = first.setdefault(image.key, number)
            if earlier != number:
                detail = f"the key is also in {self.tar_of(earlier)}; keys must be unique"
                yield self.finding(number, "duplicate_key", detail)


def join(tars: Sequence[ExaminedTar]) -> Samples:
    """The samples of `tars`, those of damaged ones left out."""
    sound = [tar for tar in tars if tar.is_sound]
    images = tuple(image for tar in sound for image in tar.images)
    labels = [max(NO_LABEL, image.label) for image in images]  # NO_LABEL for BAD_LABEL
    return Samples(
        tars=tuple(tar.path for tar in sound),
        images=images,
        groups=np.cumsum([0, *(len(tar.images) for tar in sound)], dtype=np.int64),
        labels=np.array(labels, np.int64),
    )
