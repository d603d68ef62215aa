"""`mimkit evaluate`: the numbers of a plain loop, on any number of ranks; comparisons; refusals."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT, Shards, command
from threaded_ranks import Sum, on_ranks

from mimkit.batch import normalise
from mimkit.classifier_io import Classifier, load_classifier, write_classifier
from mimkit.cli import main
from mimkit.data.sources.shards import ShardSource
from mimkit.data.views import CenterView
from mimkit.data.writer import Item, write_shard
from mimkit.downstream.predictions import load_predictions
from mimkit.evaluation import Evaluated, Evaluation, evaluate
from mimkit.export._pretrained import Normalisation
from mimkit.models.classifier import ImageClassifier
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.stems import STEMS

PIXELS = Normalisation((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def _write_model(folder: Path, classes: tuple[str, ...], *, num: int = 4, seed: int = 0) -> Path:
    """As a finetuning writes it: 32 pixels, 4 x 4 patches; its weights are drawn."""
    stem = STEMS["linear"](width=24, patch_size=8)
    encoder = ImageEncoder(stem, Encoder(width=24, heads=3, depth=1, grid=(4, 4)))
    initialise(encoder, seed=seed)
    model = ImageClassifier(encoder, num_classes=num, pooling="mean")
    model.initialise_head(seed=seed, scale=50.0)
    folder.mkdir(parents=True)
    write_classifier(folder, Classifier(model, PIXELS, classes, {}), base=None)
    return folder


@pytest.fixture(scope="module")
def model(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Path:
    classes = tuple(json.loads((shards.heldout / "classes.json").read_text()))
    return _write_model(tmp_path_factory.mktemp("model") / "best", classes)


def _alone() -> SimpleNamespace:
    return SimpleNamespace(rank=0, world=1, local_world=1, device=torch.device("cpu"),
                           sum=lambda tensor: tensor, from_rank_0=lambda value: value)  # fmt: skip


def test_equal_to_a_plain_loop(model: Path, shards: Shards, tmp_path: Path) -> None:
    asked = Evaluation(data=[str(shards.train)], crop=0.75, cache_dir=tmp_path)
    found = evaluate(model, asked, runtime=_alone())  # type: ignore[arg-type]
    source, classifier = ShardSource(shards=str(shards.train)), load_classifier(model)
    view = CenterView(image_size=32, crop=0.75)
    images = torch.stack([view(source[i].image).patch_view_CHW for i in range(len(source))])
    with torch.no_grad():
        log_BV = classifier.model(normalise(images, **PIXELS._asdict())).log_softmax(1)
    label_B = torch.from_numpy(source.labels)
    assert torch.equal(found.predictions.best_BK[:, 0], log_BV.argmax(1))
    torch.testing.assert_close(found.predictions.log_probability_B,
                               log_BV[torch.arange(96), label_B])  # fmt: skip
    assert found.scores.top1.value == float((log_BV.argmax(1) == label_B).double().mean())
    assert found.scores.top5 is None and found.scores.top1.total == 96


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_change_no_bit(world: int, model: Path, shards: Shards, tmp_path: Path) -> None:
    asked = Evaluation(data=[str(shards.train)], cache_dir=tmp_path)
    alone = evaluate(model, asked, runtime=_alone())  # type: ignore[arg-type]

    def run(rank: int, sum_over_ranks: Sum) -> Evaluated:
        runtime = SimpleNamespace(**{**vars(_alone()), "rank": rank, "world": world,
                                     "sum": sum_over_ranks})  # fmt: skip
        return evaluate(model, asked, runtime=runtime)  # type: ignore[arg-type]

    for found in on_ranks(world, run):
        for name in ("best_BK", "log_confidence_B", "log_probability_B", "label_B"):
            assert torch.equal(getattr(found.predictions, name), getattr(alone.predictions, name))
        assert found.scores.record() == alone.scores.record()


@pytest.mark.slow
def test_two_launched_ranks_say_what_one_says(
    model: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(name: str) -> list[object]:
        return [model, shards.train, "--workers", "0", "--json", tmp_path / f"{name}.json",
                "--predictions", tmp_path / name]  # fmt: skip

    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29763"]
    words = [*map(str, [*launcher, ROOT / "tools" / "evaluate.py", *given("two")])]
    ended = command(words, cwd=tmp_path, timeout=300)
    assert ended.code == 0, ended.err
    assert _run(*given("one")) == 0
    assert ended.out.count("top-1") == capsys.readouterr().out.count("top-1") == 1
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert one == two
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def _run(*words: object) -> int:
    return main(["evaluate", *map(str, words)])


def test_what_is_said_and_written(
    model: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("s.json", "s.safetensors", "s.png")]
    assert _run(model, shards.heldout, "--workers", "0", "--json", files[0], "--predictions",
                files[1], "--picture", files[2]) == 0  # fmt: skip
    record, out = json.loads(files[0].read_text()), capsys.readouterr().out
    predictions = load_predictions(files[1])
    assert record["images"] == len(predictions) == 24 and record["classes"] == [
        *predictions.classes
    ]
    assert f"top-1     {predictions.correct.double().mean():.2%} [" in out
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert record["top1"]["value"] == float(predictions.correct.double().mean())


def test_two_models_on_the_same_images(
    model: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _write_model(tmp_path / "other", load_classifier(model).classes, seed=5)
    for name, which, data in (("a", model, shards.train), ("b", other, shards.train),
                              ("c", other, shards.heldout)):  # fmt: skip
        assert _run(which, data, "--workers", "0", "--predictions", tmp_path / name) == 0
    assert _run("--compare", tmp_path / "a", tmp_path / "b") == 0
    out = capsys.readouterr().out
    one, two = load_predictions(tmp_path / "a").correct, load_predictions(tmp_path / "b").correct
    assert f"only A {int((one & ~two).sum())}, only B {int((two & ~one).sum())}" in out
    assert _run("--compare", tmp_path / "a", tmp_path / "c") == 2
    assert "source is" in capsys.readouterr().err


def _refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert _run(*words, "--workers", "0") == 2
    return " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_is_refused(
    model: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shards.heldout
    assert "give a finetuned MODEL and DATA" in _refused(capsys)
    assert "holds no finetuned model" in _refused(capsys, tmp_path, data)
    assert "there is no nowhere; give a run folder" in _refused(capsys, "nowhere", data)
    said = _refused(capsys, model, data, "--set", "cifar10")
    assert "CIFAR-10, test has 10 classes, and these shards have 4" in said
    assert "Did you mean 'cifar10'" in _refused(capsys, model, data, "--set", "cifar")
    assert "--crop is 1.5" in _refused(capsys, model, data, "--crop", 1.5)
    assert "multiple of the patch, 8" in _refused(capsys, model, data, "--image-size", 36)
    fewer = _write_model(tmp_path / "fewer", (), num=3)
    said = _refused(capsys, fewer, data)
    assert "knows 3 classes and the images have 4" in said
    names = load_classifier(model).classes
    swapped = _write_model(tmp_path / "swapped", (names[1], names[0], *names[2:]))
    said = _refused(capsys, swapped, data)
    assert f"label 0 is '{names[1]}' to the model and '{names[0]}'" in said
    (tmp_path / "bare").mkdir()
    image = ShardSource(shards=str(data), cache_dir=tmp_path)[0].image
    write_shard(tmp_path / "bare" / "x-00000.tar", [Item("a", image, "jpg", -1)], split="x")
    assert "1 of 1 images have no label" in _refused(capsys, model, tmp_path / "bare")


def test_a_broken_list_of_classes_is_refused_and_a_missing_one_said(
    model: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(shards.heldout, tmp_path / "data")
    classes = tmp_path / "data" / "classes.json"
    classes.write_text(classes.read_text()[:20])
    said = _refused(capsys, model, tmp_path / "data")
    assert f"{classes} does not name the classes" in said
    classes.unlink()
    assert _run(model, tmp_path / "data", "--workers", "0") == 0
    said = capsys.readouterr().out
    assert "note: DATA names no classes" in said and "only the numbers of the labels" in said
    nameless = _write_model(tmp_path / "nameless", ())
    assert _run(nameless, tmp_path / "data", "--workers", "0") == 0
    assert "note: the model and DATA name no classes" in capsys.readouterr().out


def test_pairs_of_older_models_are_compared_as_they_are_written_now(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [[f"n{number}", f"name {number}"] for number in range(4)]
    shutil.copytree(shards.heldout, tmp_path / "data")
    (tmp_path / "data" / "classes.json").write_text(json.dumps(pairs))
    old = _write_model(tmp_path / "old", tuple(str(pair) for pair in pairs))
    assert load_classifier(old).classes == ("n0 name 0", "n1 name 1", "n2 name 2", "n3 name 3")
    assert _run(old, tmp_path / "data", "--workers", "0") == 0
    out = capsys.readouterr().out
    assert "note" not in out and "['n" not in out and "name 2 " in out


def test_images_that_made_the_model_are_noted(model: Path, shards: Shards, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(model, run / "best")
    (run / "config.yaml").write_text(
        "init: x\ntrain: {steps: 1}\n"
        f"data: {{train: {shards.train}, heldout: {shards.heldout}}}\n"
    )

    def notes(data: Path) -> list[str]:
        asked = Evaluation(data=[str(data)], cache_dir=tmp_path)
        return evaluate(run, asked, runtime=_alone()).notes  # type: ignore[arg-type]

    [note] = notes(shards.train)
    assert note.startswith("about 96 of the 96 images are those that the model was trained on")
    [note] = notes(shards.heldout)
    assert note.startswith("about 24 of the 24 images are those by which its best weights were")


def test_other_sizes_interpolate_positions(model: Path, shards: Shards, tmp_path: Path) -> None:
    asked = Evaluation(data=[str(shards.heldout)], image_size=(48, 48), cache_dir=tmp_path)
    larger = evaluate(model, asked, runtime=_alone())  # type: ignore[arg-type]
    own = evaluate(model, Evaluation(data=[str(shards.heldout)], cache_dir=tmp_path),
                   runtime=_alone())  # type: ignore[arg-type]  # fmt: skip
    assert not torch.equal(larger.predictions.log_confidence_B, own.predictions.log_confidence_B)


def test_the_view_of_its_training_is_taken(model: Path, shards: Shards, tmp_path: Path) -> None:
    """data.test_crop of the run folder's configuration."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(model, run / "best")
    (run / "config.yaml").write_text(
        "init: x\ntrain: {steps: 1}\ndata: {test_crop: 0.5, train: nowhere}\n"
    )
    found = evaluate(run, Evaluation(data=[str(shards.heldout)], cache_dir=tmp_path),
                     runtime=_alone())  # type: ignore[arg-type]  # fmt: skip
    assert found.predictions.made_by is not None and found.predictions.made_by["crop"] == "0.5"
    [note] = found.notes
    assert "whether the model was trained on these images is not known" in note
    assert "nowhere" in note
    asked = Evaluation(data=[str(shards.heldout)], crop=0.5, cache_dir=tmp_path)
    expected = evaluate(model, asked, runtime=_alone())  # type: ignore[arg-type]
    assert torch.equal(found.predictions.log_confidence_B, expected.predictions.log_confidence_B)
