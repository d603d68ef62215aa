"""Counts of known sets, ReaL's labels by file name, and folders that are called by numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import Shards

from mimkit.data.doubles import doubles
from mimkit.data.known_sets import KNOWN_SETS, check_set, numbered_labels, real_labels
from mimkit.data.make_shards import make_shards
from mimkit.data.sources.shards import ShardSource
from mimkit.errors import UserError


def test_counts_are_the_papers() -> None:
    """Table 9 of the paper, save iNaturalist 2019: of its 268,243 images 265,213 are trained on."""
    table9 = {"inat18": (24_426, 8_142), "inat19": (268_243 - 265_213, 1_010),
              "flowers": (6_149, 102), "cars": (8_041, 196), "cifar100": (10_000, 100),
              "cifar10": (10_000, 10)}  # fmt: skip
    for name, (images, classes) in table9.items():
        assert (KNOWN_SETS[name].test_images, KNOWN_SETS[name].classes) == (images, classes)


def test_counts_are_checked(shards: Shards) -> None:
    source = ShardSource(shards=str(shards.heldout))
    with pytest.raises(UserError, match="has 196 classes, and these shards have 4"):
        check_set("cars", source, classes=4)
    [note] = check_set("cars", source, classes=196)
    assert "8041 images, and these shards 24" in note


def test_folders_called_by_numbers(shards: Shards, tmp_path: Path) -> None:
    """make_shards sorts their names as text: 0, 1, 10, 11, 2, ..."""
    image = ShardSource(shards=str(shards.heldout))[0].image
    for number in range(12):
        folder = tmp_path / "v2" / str(number)
        folder.mkdir(parents=True)
        (folder / f"image-{number}.jpg").write_bytes(image)
    make_shards(str(tmp_path / "v2"), tmp_path / "out", name="v2")
    source = ShardSource(shards=str(tmp_path / "out"))
    told = [int(key.rpartition("-")[2]) for key in source.keys]
    assert not np.array_equal(source.labels, told)
    assert numbered_labels(source).tolist() == told
    with pytest.raises(UserError, match=r"4 classes such as 'astronaut\.png'"):
        numbered_labels(ShardSource(shards=str(shards.heldout)))


def test_real_goes_by_file_names(tmp_path: Path) -> None:
    labels = [[number % 1000] for number in range(50_000)]
    labels[292] = []
    file = tmp_path / "real.json"
    file.write_text(json.dumps(labels))
    keys = [
        "n01440764/ILSVRC2012_val_00000293",
        "ILSVRC2012_val_00000001",
        "a/ILSVRC2012_val_00001500",
    ]
    assert real_labels(file, keys) == [[], [0], [499]]
    with pytest.raises(UserError, match="1 images have no ILSVRC2012_val"):
        real_labels(file, ["cat/1"])
    file.write_text(json.dumps(labels[:-1]))
    with pytest.raises(UserError, match="50,000 lists"):
        real_labels(file, keys)
    with pytest.raises(UserError, match="cannot read"):
        real_labels(tmp_path / "none.json", keys)


def test_doubles_go_by_content(shards: Shards) -> None:
    train, heldout = (ShardSource(shards=str(path)) for path in (shards.train, shards.heldout))
    told: list[tuple[int, int]] = []
    assert doubles(train, heldout, progress=lambda done, of: told.append((done, of))) == []
    assert told[-1] == (120, 120)
    found = doubles(train, train)
    assert [double.key for double in found] == train.keys
    assert all(d.key == d.train_key and d.label == d.train_label for d in found)
