"""The embedded data set: real, balanced, disjoint, made once."""

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from mimkit.data import embedded
from mimkit.data.decode import decode_image
from mimkit.data.sources.shards import ShardSource
from mimkit.errors import UserError


def ask(cache: Path) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    embedded.embedded_shards(cache)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by two processes that start at the same time."""
    folder = tmp_path_factory.mktemp("cache")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=ask, args=(folder,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    return folder


def test_it_is_made_once_and_nothing_else_is_left(cache: Path) -> None:
    names = sorted(path.name for path in cache.iterdir())
    assert names == [embedded.NAME, f"{embedded.NAME}.lock"]
    before = (cache / embedded.NAME / "train-00000.tar").stat().st_mtime_ns
    assert embedded.embedded_shards(cache) == cache / embedded.NAME
    assert (cache / embedded.NAME / "train-00000.tar").stat().st_mtime_ns == before


@pytest.mark.parametrize(("split", "num_crops"), [("train", 189), ("heldout", 50)])
def test_it_is_balanced_and_readable(cache: Path, split: str, num_crops: int) -> None:
    source = ShardSource(shards=f"{cache}/{embedded.NAME}/{split}-*.tar")
    classes = json.loads((cache / embedded.NAME / "classes.json").read_text())
    assert len(classes) == 16
    assert np.bincount(source.labels).tolist() == [num_crops] * 16
    assert len(set(source.labels[:32].tolist())) > 8  # mixed
    for index in range(0, len(source), 97):
        sample = source[index]
        assert sample.key.startswith(f"{split}_{classes[sample.label]}_")
        assert decode_image(sample.image).shape == (144, 144, 3)


def test_it_is_the_same_every_time(cache: Path) -> None:
    source = ShardSource(shards=f"{cache}/{embedded.NAME}/heldout-*.tar")
    stored = {source[i].key: (source[i].image, source[i].label) for i in range(len(source))}
    again = embedded._crops(embedded._photographs(), "heldout")
    assert {item.key: (item.image, item.label) for item in again} == stored


def test_train_and_heldout_share_no_pixel() -> None:
    for shape in [(40, 100, 3), (100, 40, 3), (50, 50, 3)]:
        places = np.arange(np.prod(shape)).reshape(shape)
        train, largest = embedded.region(places, "train")
        heldout, same = embedded.region(places, "heldout")
        assert largest == same == min(heldout.shape[:2])
        assert not set(train.flat) & set(heldout.flat)
        assert train.size + heldout.size == places.size
        assert abs(train.size / places.size - 0.7) < 0.02


def test_a_missing_photograph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_SKLEARN", ("venus.jpg",))
    with pytest.raises(UserError, match=r"venus\.jpg.*pip install"):
        embedded.embedded_shards(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
