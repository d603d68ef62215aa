"""kNN probes of a pretraining: why some are not made, and that the training feels nothing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import ROOT, Shards, pretrain
from threaded_ranks import Sum, on_ranks

from mimkit.config import load_config
from mimkit.data.sources.shards import ShardSource
from mimkit.data.writer import Item, write_shard
from mimkit.probing import Ranks, online_probe, probe
from mimkit.train import checkpoint


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


def _lines(run: Path, kind: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def watched_run(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `finished_run`, with probes on the way."""
    runs = tmp_path_factory.mktemp("watched") / "runs"
    words = [*tiny, f"output.runs_dir={runs}", "probe.every=2", "probe.every_limit=40"]
    assert pretrain(words) == 0
    return (runs / "latest").resolve()


def test_training_feels_no_probe(watched_run: Path, finished_run: Path) -> None:
    one, other = ([{k: v for k, v in line.items() if k != "images_per_second"}
                   for line in _lines(run, "train")]
                  for run in (watched_run, finished_run))  # fmt: skip
    assert len(one) == 6 and one == other
    weights = [checkpoint.load(checkpoint.latest(run / "checkpoints")).weights
               for run in (watched_run, finished_run)]  # fmt: skip
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_probes_and_their_cost_are_on_record(watched_run: Path) -> None:
    probes = [line for line in _lines(watched_run, "heldout") if "online_knn_top1" in line]
    assert [line["step"] for line in probes] == [2, 4, 6]
    assert all(0 <= line["online_knn_top1"] <= 1 for line in probes)
    summary = json.loads((watched_run / "summary.json").read_text())
    assert summary["online_knn_top1"] == probes[-1]["online_knn_top1"]
    seconds = [line["online_probe_seconds"] for line in probes]
    assert min(seconds) > 0
    assert summary["online_probe_seconds_total"] == pytest.approx(sum(seconds), abs=0.01)


def test_ranks_share_an_online_probe(watched_run: Path, tiny: list[str], shards: Shards,
                                     tmp_path: Path) -> None:  # fmt: skip
    """And it finds what the probe at the end finds, where both look at the same images."""
    words = [*tiny, "probe.every=2", "probe.every_limit=96"]
    config = load_config(ROOT / "configs" / "default.yaml", words)
    newest = checkpoint.latest(watched_run / "checkpoints")
    assert newest is not None
    weights = dict(checkpoint.load(newest).weights)
    train, heldout = (ShardSource(shards=str(path), cache_dir=tmp_path)
                      for path in (shards.train, shards.heldout))  # fmt: skip
    device = torch.device("cpu")

    def run(rank: int, sum_over_ranks: Sum) -> dict[str, float]:
        ranks = Ranks(device, 0, rank, 2, sum_over_ranks)
        return online_probe(config, weights, train, heldout, ranks=ranks)

    alone = probe(config, weights, train, heldout, device=device, workers=0)
    for found in on_ranks(2, run):
        assert found == {"online_knn_top1": alone["knn_top1"]}


def test_an_online_probe_without_labels_is_refused(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny, f"output.runs_dir={tmp_path}", "probe.every=2", "data.heldout=null"]
    assert pretrain(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "probe.every=2 asks for kNN during training, but data.heldout is null" in said
