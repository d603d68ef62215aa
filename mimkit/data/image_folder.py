"""A folder of images: which files are images, which class each belongs to, which key it gets."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mimkit.batch import NO_LABEL
from mimkit.errors import UserError

# Other suffixes are no images to us. Those of the second line are listed as failures, with the
# reason; what a file really is, its content says.
_READ = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp"}
_NOT_READ = {".gif", ".tif", ".tiff", ".bmp", ".ppm", ".pgm", ".heic", ".avif", ".jp2", ".jxl"}


@dataclass(frozen=True)
class ImageFolder:
    """Attributes:
    root: the folder.
    names: paths of the images relative to it, with "/", sorted.
    labels: one each; the number of the class subfolder, NO_LABEL in a flat folder.
    classes: names of the class subfolders, sorted; empty for a flat folder.
    num_others: files that are no images (lists, hidden files, ...).
    """

    root: Path
    names: list[str]
    labels: list[int]
    classes: list[str]
    num_others: int


def list_images(root: Path) -> ImageFolder:
    """Every image below `root`: `root/CLASS/.../image.jpg`, or `root/image.jpg` without classes.

    Raises:
        UserError: no such folder, no image in it, or images both in it and in subfolders.
    """
    if not root.is_dir():
        raise UserError(f"{root} is {'not a folder' if root.exists() else 'not there'}.")
    files = sorted(_files(root))
    names = [name for name in files if _is_image(name)]
    if not names:
        raise UserError(
            f"{root} holds no image ({len(files)} other files); expected .jpg, .png or .webp, in "
            "one subfolder for each class or directly in it."
        )
    tops = [name.partition("/")[0] if "/" in name else "" for name in names]
    classes = sorted(set(tops))
    if "" in classes and len(classes) > 1:
        raise UserError(
            f"{root} holds {tops.count('')} images itself and others in subfolders such as "
            f"'{classes[1]}'; expected one subfolder for each class, or no subfolders."
        )
    number = {name: label for label, name in enumerate(classes)} if classes != [""] else {}
    labels = [number.get(top, NO_LABEL) for top in tops]
    return ImageFolder(root, names, labels, list(number), len(files) - len(names))


def unique_keys(names: Iterable[str]) -> list[str]:
    """A key for each path: no suffix, no dots or blanks; a number is added where two would agree.

    webdataset ends a key at the first dot, so `a.1.jpg` and `a.2.jpg` would be one sample.
    """
    taken, keys = set[str](), []
    for name in names:
        folder, slash, base = name.rpartition("/")
        stem = folder + slash + (base.rpartition(".")[0] or base)
        plain = "/".join(re.sub(r"[^\w-]", "_", part) for part in stem.split("/"))
        key, number = plain, 2
        while key in taken:
            key, number = f"{plain}_{number}", number + 1
        taken.add(key)
        keys.append(key)
    return keys


def _files(root: Path) -> Iterator[str]:
    seen = set[tuple[int, int]]()  # links to folders are followed, but not in circles
    for folder, subfolders, files in os.walk(root, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        relative = Path(folder).relative_to(root).as_posix()
        yield from (file if relative == "." else f"{relative}/{file}" for file in files)


def _is_image(name: str) -> bool:
    base = name.rpartition("/")[2]
    return not base.startswith(".") and Path(base).suffix.lower() in _READ | _NOT_READ
