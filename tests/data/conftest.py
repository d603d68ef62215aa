"""Real photographs, and shards made of them with the real writer."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from photographs import PHOTOGRAPHS, as_jpeg
from PIL import Image

from mimkit.data.writer import Item, write_shard

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def photograph() -> np.ndarray:
    """451 x 300 pixels of a cat, height x width x RGB."""
    return np.array(Image.open(PHOTOGRAPHS / "chelsea.png").convert("RGB"))


@pytest.fixture(scope="session")
def jpegs(photograph: np.ndarray) -> list[bytes]:
    """Twenty different crops, small and of several shapes."""
    return [as_jpeg(photograph[5 * i : 5 * i + 60, 9 * i : 9 * i + 50 + i]) for i in range(20)]


@pytest.fixture(scope="session")
def written_shards(tmp_path_factory: pytest.TempPathFactory, jpegs: list[bytes]) -> Path:
    """Three shards of 7, 5 and 8 samples, labels 0..19; to be copied."""
    folder = tmp_path_factory.mktemp("written")
    items = [Item(f"cat/{i:03d}", jpegs[i], "jpg", i) for i in range(20)]
    for number, (first, last) in enumerate([(0, 7), (7, 12), (12, 20)]):
        write_shard(folder / f"train-{number:05d}.tar", items[first:last], split="train")
    return folder


@pytest.fixture
def shard_folder(tmp_path: Path, written_shards: Path) -> Path:
    """The three shards in a folder of the test's own."""
    return Path(shutil.copytree(written_shards, tmp_path / "shards"))


@pytest.fixture(autouse=True)
def home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing goes to the cache of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield


@pytest.fixture(scope="session")
def odd_images() -> Path:
    folder = SHARED / "odd-images"
    if not folder.is_dir():
        pytest.skip("the shared data sets are not here")
    return folder
