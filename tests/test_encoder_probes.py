"""`mimkit probe` as a user gives it, on a tiny pretraining; what it refuses, before features."""

import json
import shutil
from pathlib import Path

import pytest
from commands import Shards

from mimkit.cli import main
from mimkit.data.sources.shards import ShardSource
from mimkit.data.writer import Item, write_shard
from mimkit.downstream.predictions import load_predictions


def _probe(run: Path, train: Path, test: Path, *words: str | Path) -> int:
    given = ["probe", run, "--train", train, "--test", test, "--device", "cpu", "--workers", "0"]
    return main([*map(str, given), *map(str, words)])


def test_what_probes_say_and_write(
    finished_run: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json", tmp_path / "p.json", "--predictions", tmp_path / "said",
             "--features", tmp_path / "features", "--cache-dir", tmp_path]  # fmt: skip
    two = ["--probe", "knn", "attentive"]  # every probe is tested by its contract, this is the rest
    assert _probe(finished_run, shards.train, shards.heldout, *words, *two) == 0
    record, out = json.loads((tmp_path / "p.json").read_text()), capsys.readouterr().out
    assert list(record["probes"]) == ["knn", "attentive"]
    assert (record["train_images"], record["test_images"], record["classes"]) == (96, 24, 4)
    assert record["shared_images"] == 0 and record["chance"] == 0.25
    for name, found in record["probes"].items():
        predictions = load_predictions(tmp_path / "said" / f"{name}.safetensors")
        assert predictions.source == ShardSource(shards=str(shards.heldout)).digest
        top1 = float(predictions.correct.double().mean())
        assert found["test"]["top1"]["value"] == pytest.approx(top1)
        assert found["test"]["top1"]["low"] < top1 < found["test"]["top1"]["high"]
        assert f"{name}: right of {found['validation_images']} images" in out
        assert found["train_images"] == 96 and found["validation_images"] == 20
        assert top1 > 0.5  # photographs of other colours; chance is 0.25
    assert "features: kept in" in out
    assert _probe(finished_run, shards.train, shards.heldout, *words, "--probe", "knn") == 0
    assert "train features: kept in" in capsys.readouterr().out  # kNN needs no tokens
    assert _probe(finished_run, shards.train, shards.heldout, *words, "--probe", "knn") == 0
    again = json.loads((tmp_path / "p.json").read_text())["probes"]["knn"]
    assert "test features: found in" in capsys.readouterr().out
    assert again["table"] == record["probes"]["knn"]["table"]
    assert again["test"] == record["probes"]["knn"]["test"]


def test_test_images_that_are_trained_on_are_told(
    finished_run: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ShardSource(shards=str(shards.train), cache_dir=tmp_path)
    held = ShardSource(shards=str(shards.heldout), cache_dir=tmp_path)
    (tmp_path / "leaky").mkdir()
    items = [Item(f"other_{i}", s.image, "jpg", s.label)
             for i, s in enumerate([source[3], *(held[n] for n in range(8))])]  # fmt: skip
    write_shard(tmp_path / "leaky" / "x-00000.tar", items, split="x")
    assert _probe(finished_run, shards.train, tmp_path / "leaky", "--features", "none", "--probe",
                  "knn", "--json", tmp_path / "p.json") == 0  # fmt: skip
    assert json.loads((tmp_path / "p.json").read_text())["shared_keys"] == ["other_0"]
    said = capsys.readouterr().out
    assert (
        f"1 test images are trained on, byte for byte: other_0 (in train: {source[3].key})" in said
    )


def _refused(capsys: pytest.CaptureFixture[str], *given: object) -> str:
    assert _probe(*given) == 2  # type: ignore[arg-type]
    captured = capsys.readouterr()
    assert "features" not in captured.out
    return " ".join(captured.err.split())


def test_what_cannot_be_is_refused(
    finished_run: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (capsys, finished_run, shards.train)
    said = _refused(*common, shards.heldout, "--probe", "knm")
    assert "no probe called 'knm'. Did you mean 'knn'?" in said
    assert "names knn more than once" in _refused(*common, shards.heldout, "--probe", "knn", "knn")
    assert "block 2, and the encoder has 1..1" in _refused(*common, shards.heldout, "--layers", "2")
    assert "--limit is 0" in _refused(*common, shards.heldout, "--limit", "0")
    assert "patch" in _refused(*common, shards.heldout, "--image-size", "33")
    assert "no" in _refused(capsys, tmp_path / "nothing", shards.train, shards.heldout)
    said = _refused(*common, shards.heldout, "--limit", "6")
    assert "classes have a single image in --train" in said
    said = _refused(capsys, finished_run, shards.heldout, shards.train, "--limit", "3")
    assert "class" in said


def test_other_classes_and_missing_labels(
    finished_run: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(shards.heldout, other)
    names = json.loads((other / "classes.json").read_text())
    (other / "classes.json").write_text(json.dumps(names[::-1]))
    said = _refused(capsys, finished_run, shards.train, other)
    assert "--train and --test mean different classes" in said
    (other / "classes.json").unlink()
    assert _probe(finished_run, shards.train, other, "--features", "none", "--probe", "knn") == 0
    assert "note: --test names no classes" in capsys.readouterr().out
    source = ShardSource(shards=str(shards.heldout), cache_dir=tmp_path)
    (tmp_path / "bare").mkdir()
    items = [Item(str(i), source[i].image, "jpg", -1) for i in range(4)]
    write_shard(tmp_path / "bare" / "x-00000.tar", items, split="x")
    said = _refused(capsys, finished_run, shards.train, tmp_path / "bare")
    assert "--test: 4 of 4 images have no label" in said
