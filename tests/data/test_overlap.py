"""Images that are trained on and held out are noticed; equal keys alone are not enough."""

from pathlib import Path

import pytest
from commands import Shards, pretrain

from mimkit.data.overlap import Shared, shared_images
from mimkit.data.sources.shards import ShardSource
from mimkit.data.subset import SubsetSource
from mimkit.data.writer import Item, write_shard


def test_nothing_is_shared_by_two_splits(shards: Shards) -> None:
    train, heldout = (ShardSource(shards=str(folder)) for folder in (shards.train, shards.heldout))
    assert shared_images(train, heldout) == Shared(0, 0, 0)


def test_a_part_that_is_trained_on_is_counted(shards: Shards) -> None:
    train = ShardSource(shards=str(shards.train))
    assert shared_images(train, train) == Shared(96, 32, 32)
    part = SubsetSource(train, range(10))
    found = shared_images(train, part)
    assert (found, found.estimate) == (Shared(10, 10, 10), 10)


def test_equal_keys_of_other_images_are_no_overlap(shards: Shards, tmp_path: Path) -> None:
    """As CIFAR-10's test keys all stand in train too; of 30 keys, 10 have the same image."""
    train = ShardSource(shards=str(shards.train))
    items = [Item(train[i].key, train[i if i < 10 else i + 40].image, "jpg", 0) for i in range(30)]
    assert write_shard(tmp_path / "other-00000.tar", items, split="other") is not None
    found = shared_images(train, ShardSource(shards=str(tmp_path / "other-00000.tar")))
    assert (found.keys, found.compared, found.same, found.estimate) == (30, 30, 10, 10)


def test_a_run_says_so_at_its_start_and_at_its_end(
    shards: Shards, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny, f"output.dir={tmp_path}", f"data.heldout={shards.train}", "train.steps=1"]
    assert pretrain(words) == 0
    said = capsys.readouterr().out
    assert "warning: about 96 of the 96 images in data.heldout are trained on" in said
    assert "WARNING: about 96 of the held-out images were trained on" in said


def test_a_batch_larger_than_an_epoch_is_told(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = ["train.steps=1", "train.batch_size=100", "data.heldout=null"]
    assert pretrain([*tiny, *large, f"output.dir={tmp_path / 'run'}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: a batch has 100 samples and an epoch 96" in said
