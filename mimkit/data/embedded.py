"""The embedded data set: crops of the photographs that come in scikit-image's and scikit-learn's
wheels, written once as shards and read like anybody's.

Each photograph is cut in two along its longer side, and train and held-out crops come from
different parts: no pixel is in both. The label of a crop is its photograph.
"""

import importlib.util
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from mimkit.data.decode import Pixels, decode_image
from mimkit.data.manifest import MANIFEST
from mimkit.data.resize import resize
from mimkit.data.writer import Item, ShardRecord, write_manifest, write_shard
from mimkit.errors import UserError
from mimkit.files import disk_errors, locked, sync
from mimkit.random import Purpose, Rng, generator

NAME = "embedded-v1"  # another number whenever the crops change
SIDE = 144  # pixels of a crop as it is stored
TRAIN_SHARE = 0.7  # of the longer side
# Real photographs only: no drawings, no scans of text, one of the two motorcycles; and none whose
# held-out part would show nothing (cell, clock_motion).
_SKIMAGE = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
_SKLEARN = ("china.jpg", "flower.jpg")
_CROPS = {"train": 189, "heldout": 50}  # for each of 16 photographs: 3,024 and 800
_SHARDS = {"train": 4, "heldout": 1}
_SMALLEST_CROP = 64
_FLAT = 4.0  # grey levels of standard deviation: night sky, a black border
_QUALITY = 92


def embedded_shards(cache_dir: str | Path) -> Path:
    """The folder with train-*.tar and heldout-*.tar; made below `cache_dir` if it is not there.

    Takes some seconds, once. Any number of processes may ask at the same time: one makes it.

    Raises:
        UserError: a photograph is missing, or `cache_dir` cannot be written to.
    """
    cache = Path(cache_dir).expanduser()
    folder = cache / NAME
    if (folder / MANIFEST).exists():
        return folder
    with disk_errors(cache, "Free space, or set data.cache_dir to a folder of yours."):
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"{NAME}.lock"):
            if not (folder / MANIFEST).exists():
                _make(folder)
    return folder


def _make(folder: Path) -> None:
    temporary = folder.with_name(f".{NAME}.tmp")
    for left in (temporary, folder):  # by a killed process; or somebody deleted half of it
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir()
        _write(temporary)
        sync(temporary)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: Path) -> None:
    photographs = _photographs()
    records: list[ShardRecord] = []
    for split in _CROPS:
        items = list(_crops(photographs, split))
        order = _rng(split, epoch=1).permutation(len(items))
        for shard, part in enumerate(np.array_split(order, _SHARDS[split])):
            path = folder / f"{split}-{shard:05d}.tar"
            record = write_shard(path, (items[i] for i in part), split=split)
            assert record is not None
            records.append(record)
    write_manifest(
        folder,
        records,
        source="photographs in the wheels of scikit-image and scikit-learn",
        classes=list(photographs),
        settings={"side": SIDE, "train_share": TRAIN_SHARE, "quality": _QUALITY},
    )


def _photographs() -> dict[str, Path]:
    """Path of each photograph by its name, sorted. Nothing of the two packages is imported."""
    files = [(_package("skimage") / "data", name) for name in _SKIMAGE]
    files += [(_package("sklearn") / "datasets" / "images", name) for name in _SKLEARN]
    paths = {Path(name).stem: folder / name for folder, name in files}
    missing = [str(path) for path in paths.values() if not path.exists()]
    if missing:
        raise UserError(
            f"the embedded data set needs photographs that are not there: {', '.join(missing)}. "
            "They come with: pip install 'scikit-image>=0.24' 'scikit-learn>=1.5'"
        )
    return dict(sorted(paths.items()))


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise UserError(
            f"the embedded data set needs the package {name}: "
            "pip install 'scikit-image>=0.24' 'scikit-learn>=1.5'"
        )
    return Path(spec.origin).parent


def _crops(photographs: dict[str, Path], split: str) -> Iterator[Item]:
    for label, (name, path) in enumerate(photographs.items()):
        part, largest = region(decode_image(path.read_bytes()), split)
        for number in range(_CROPS[split]):
            crop = _draw_crop(part, largest, _rng(split, sample=1000 * label + number))
            yield Item(f"{split}_{name}_{number:03d}", _encode(crop), "jpg", label)


def region(photograph: Pixels, split: str) -> tuple[Pixels, int]:
    """The part of `photograph` for `split`, and the side of the largest crop, in pixels.

    Held out is the end of the longer side that shows more. Both splits have crops of the same
    sizes, those that fit into the held-out part.
    """
    is_wide = photograph.shape[1] >= photograph.shape[0]
    wide = photograph if is_wide else photograph.swapaxes(0, 1)
    width = round((1 - TRAIN_SHARE) * wide.shape[1])
    if _detail(wide[:, :width]) > _detail(wide[:, -width:]):
        heldout, train = wide[:, :width], wide[:, width:]
    else:
        heldout, train = wide[:, -width:], wide[:, :-width]
    part = train if split == "train" else heldout
    return (part if is_wide else part.swapaxes(0, 1)), min(heldout.shape[:2])


def _detail(part: Pixels) -> float:
    """Mean difference of neighbouring pixels."""
    return float(np.abs(np.diff(part.astype(np.int16), axis=1)).mean())


def _draw_crop(part: Pixels, largest: int, rng: Rng) -> Pixels:
    """A square of random size and place; one that shows next to nothing is drawn again."""
    for _ in range(20):
        side = int(rng.integers(_SMALLEST_CROP, largest + 1))
        top = int(rng.integers(part.shape[0] - side + 1))
        left = int(rng.integers(part.shape[1] - side + 1))
        crop = part[top : top + side, left : left + side]
        if crop.std() >= _FLAT:
            break
    return crop


def _encode(crop: Pixels) -> bytes:
    square = resize(crop, SIDE, "bicubic").permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(square).save(buffer, "JPEG", quality=_QUALITY, subsampling=0)
    return buffer.getvalue()


def _rng(split: str, *, epoch: int = 0, sample: int = 0) -> Rng:
    seed = list(_CROPS).index(split)
    return generator(Purpose.EMBEDDED_CROPS, seed=seed, epoch=epoch, sample=sample)
