"""When a kNN accuracy would mean nothing, no number is given but the reason."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import ROOT, Shards

from mimkit.config import load_config
from mimkit.data.sources.shards import ShardSource
from mimkit.data.writer import Item, write_shard
from mimkit.probing import probe


def _skipped(train: Path, heldout: Path | None, cache: Path) -> str:
    sources = [
        None if folder is None else ShardSource(shards=str(folder), cache_dir=cache)
        for folder in (train, heldout)
    ]
    assert sources[0] is not None
    config = load_config(ROOT / "configs" / "default.yaml")
    device = torch.device("cpu")
    found = probe(config, {}, sources[0], sources[1], device=device, workers=0)
    assert list(found) == ["knn_skipped"]
    return str(found["knn_skipped"])


def test_labels_that_mean_different_classes(shards: Shards, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(shards.heldout, other)
    names = json.loads((other / "classes.json").read_text())
    (other / "classes.json").write_text(json.dumps(names[1:]))
    said = _skipped(shards.train, other, tmp_path)
    assert "4 (astronaut.png" in said and "3 (chelsea.png" in said


@pytest.mark.parametrize(("label", "reason"), [(0, "the same label"), (-1, "have no labels")])
def test_labels_that_tell_nothing(label: int, reason: str, shards: Shards, tmp_path: Path) -> None:
    source = ShardSource(shards=str(shards.heldout), cache_dir=tmp_path)
    (tmp_path / "one").mkdir()
    items = [Item(str(i), source[i].image, "jpg", label) for i in range(4)]
    write_shard(tmp_path / "one" / "x-00000.tar", items, split="x")
    assert reason in _skipped(shards.train, tmp_path / "one", tmp_path)


def test_nothing_held_out(shards: Shards, tmp_path: Path) -> None:
    assert "data.heldout" in _skipped(shards.train, None, tmp_path)
