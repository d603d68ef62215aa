"""Encoders out of run folders, and into another library's file, with proof."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from commands import pretrain
from safetensors import safe_open
from timm.models.vision_transformer import VisionTransformer

from mimkit import build
from mimkit.classifier_io import Classifier, write_classifier
from mimkit.cli import main
from mimkit.config import load_config, to_yaml
from mimkit.encoder_export import export_run
from mimkit.encoder_io import load_encoder, load_run
from mimkit.errors import UserError
from mimkit.export import EXPORTERS
from mimkit.export.timm import load
from mimkit.files import sha256
from mimkit.models.classifier import ImageClassifier
from mimkit.models.regroup import regroup
from mimkit.models.resize import resized
from mimkit.train import checkpoint


def _images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_the_encoder_is_that_of_the_newest_checkpoint(finished_run: Path) -> None:
    config, encoder, newest = load_run(finished_run)
    assert newest == finished_run / "checkpoints" / "step-00000006"
    assert (config.encoder.depth, config.stem.name) == (1, "hmlp")
    assert not encoder.training
    saved = checkpoint.load(newest).weights
    ours = encoder.state_dict()
    assert len(ours) > 10
    assert [name for name, value in ours.items() if not torch.equal(value, saved[name])] == []


def test_a_checkpoint_can_be_chosen(finished_run: Path) -> None:
    _, first, path = load_run(finished_run / "checkpoints" / "step-00000004")
    _, last, _ = load_run(finished_run)
    assert path.name == "step-00000004"
    with torch.no_grad():
        assert not torch.allclose(first(_images()), last(_images()), atol=1e-5)


FORMATS = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(any(find_spec(p) is None for p in EXPORTERS[name]().packages),
                               reason="needs mimkit[export]"),
            *([] if EXPORTERS[name]().casts else [pytest.mark.slow]),
        ],
    )
    for name in EXPORTERS.names()
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_the_exported_encoder_of_a_run_gives_the_same_features(
    name: str, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "encoder"
    assert main(["export", str(finished_run), "--format", name, str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    _, encoder, _ = load_run(finished_run)
    exporter = EXPORTERS[name]()
    loaded = exporter.load(out)
    with torch.no_grad():
        ours, theirs = encoder(_images()), exporter.tokens(loaded, _images())
    assert float((ours - theirs).abs().max()) <= exporter.tolerance
    assert float(ours.std()) > 0.1


def test_the_card_says_what_was_trained_on_what_and_proves_it(
    finished_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "encoder.safetensors"
    words = [str(finished_run), str(out), "--format", "safetensors", "--licence", "cc-by-4.0"]
    assert main(["export", *words]) == 0
    card = (tmp_path / "encoder.safetensors.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert (head["license"], head["library_name"]) == ("cc-by-4.0", "mimkit")
    assert head["pipeline_tag"] == "image-feature-extraction"
    run = json.loads((finished_run / "run.json").read_text())["facts"]
    summary = json.loads((finished_run / "summary.json").read_text())
    leaks = json.loads((finished_run / "audits" / "leak.json").read_text())
    for said in (
        f"| train digest | {run['train_digest']} |", f"| tokenizer | {run['tokenizer']} |",
        "| updates | 6 |", "| images seen | 48 |", "| batch | 8 |",
        f"| heldout_loss | {summary['heldout_loss']:.4g} |",
        f"moves {leaks[0]['visible_moved']:.1%} of the visible tokens",
        "## Intended use", "| 32x32 | 4 | 0.0e+00 | 0.0e+00 |", "In bfloat16", "CPU thread",
        f"| encoder.safetensors | sha256 `{sha256(out)}` |",
    ):  # fmt: skip
        assert said in card, said
    assert str(finished_run.parent) not in card, "a path of this machine"
    assert str(finished_run.parent) not in str(load_encoder(out).about)


@pytest.mark.parametrize("text", ["64", "48x64"])
def test_positions_are_interpolated_to_the_size_asked_for(
    text: str, finished_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "encoder"
    words = [str(finished_run), str(out), "--format", "timm", "--image-size", text]
    assert main(["export", *words]) == 0
    height, width = (int(side) for side in (text.split("x") * 2)[:2])
    _, encoder, _ = load_run(finished_run)
    images = torch.randn(1, 3, height, width)
    with torch.no_grad():
        expected = resized(encoder, (height // 8, width // 8))(images)
        got = load(out).forward_features(images)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert f"for images of {height}x{width} pixels" in (tmp_path / "encoder.md").read_text()
    assert "| positions_from | [32, 32] |" in (tmp_path / "encoder.md").read_text()


@pytest.mark.parametrize("text", ["0", "32x", "big", "32x32x32", "33"])
def test_a_size_that_is_none_is_refused(
    text: str, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(finished_run), str(tmp_path / "out"), "--image-size", text]
    assert main(["export", *words]) == 2
    message = " ".join(capsys.readouterr().err.split())
    expected = "33x33 pixels, which do not divide" if text == "33" else f"'{text}'"
    expected = f"--image-size is {expected}"
    assert expected in message
    assert list(tmp_path.iterdir()) == []


def _run_of(base: Path, folder: Path, *overrides: str) -> Path:
    """A run folder with these settings, its model as initialised."""
    config = load_config(base / "config.yaml", list(overrides))
    weights = build.build_model(config, prediction_dim=64).state_dict()
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    state = checkpoint.Checkpoint(updates=1, position=8, weights=weights, moments={})
    checkpoint.save(folder / "checkpoints", state, keep=1)
    return folder


@pytest.mark.parametrize("stem", ["linear", "linear_bn"])
def test_a_run_is_exported_with_its_head(stem: str, finished_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = _run_of(finished_run, tmp_path / "run", f"stem={stem}", "encoder.positions=relative")
    words = [str(run), str(tmp_path / "model"), "--format", "hf", "--with-head"]
    assert main(["export", *words, *(["--fold"] if stem == "linear_bn" else [])]) == 0
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["BeitForMaskedImageModeling"]
    assert config["vocab_size"] == 64
    loaded = EXPORTERS["hf"]().load(tmp_path / "model")
    original = build.build_model(load_config(run / "config.yaml"), prediction_dim=64).eval()
    mask_BN = torch.arange(16)[None].expand(3, -1) % 3 == 0
    with torch.no_grad():
        got = loaded(_images(), bool_masked_pos=mask_BN).logits[mask_BN]
        torch.testing.assert_close(got, original(_images(), mask_BN), rtol=0, atol=1e-5)
    assert "| Metrics" not in (card := (tmp_path / "model" / "README.md").read_text())
    assert "## Metrics\n\nNone on record." in card


def test_a_head_of_another_placement_is_refused(finished_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = _run_of(finished_run, tmp_path / "run", "stem=linear", "mask_at=before_stem")
    with pytest.raises(UserError, match=r"mask_at=before_stem.*leave --with-head out"):
        export_run(run, format_name="hf", out=tmp_path / "model", with_head=True)
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_the_proof_runs_on_held_out_images_or_on_the_embedded_ones(
    finished_run: Path, tmp_path: Path
) -> None:
    """A run whose images lie on another machine can still be exported."""
    run = tmp_path / "moved"
    shutil.copytree(finished_run, run, symlinks=True)
    config = (run / "config.yaml").read_text()
    heldout = load_run(finished_run)[0].data.heldout
    assert str(heldout) in config
    (run / "config.yaml").write_text(config.replace(str(heldout), "/nowhere/heldout"))
    reports = [export_run(folder, format_name="timm", out=tmp_path / f"{number}.safetensors")
               for number, folder in enumerate((finished_run, run))]  # fmt: skip
    assert [done.report.images for done in reports] == [4, 4]
    assert all(done.report.max_difference <= 1e-5 for done in reports)
    assert all(len(done.moved) == 0 for done in reports)


@pytest.mark.slow
def test_a_parallel_run_trains_with_drop_path_and_is_exported(
    tiny: list[str], tmp_path: Path
) -> None:
    words = [*tiny, "encoder.size=Ti2x2", "encoder.depth=2", "train.steps=4"]
    assert pretrain([*words, f"output.runs_dir={tmp_path}"]) == 0
    run = tmp_path / "latest"
    config, encoder, _ = load_run(run)
    assert (config.encoder.depth, config.encoder.branches) == (2, 2)
    assert config.encoder.drop_path == 0.2
    done = export_run(run, format_name="timm", out=tmp_path / "parallel.safetensors")
    assert done.report.max_difference <= 1e-5
    loaded = load(tmp_path / "parallel.safetensors")
    assert [block.num_parallel for block in loaded.blocks] == [2, 2]
    with torch.no_grad():
        got = loaded.forward_features(_images())
        torch.testing.assert_close(got, encoder(_images()), rtol=0, atol=1e-5)


@pytest.fixture
def deep_run(finished_run: Path, tmp_path: Path) -> Path:
    """A run folder of four blocks."""
    return _run_of(finished_run, tmp_path / "deep", "encoder.size=Ti4")


def test_a_regrouped_encoder_is_exported_with_how_far_it_moved(
    deep_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "parallel.safetensors"
    assert main(["export", str(deep_run), str(out), "--format", "timm", "--regroup", "2"]) == 0
    said = capsys.readouterr().out
    _, sequential, _ = load_run(deep_run)
    parallel = load(out)
    assert len(parallel.blocks) == 2
    with torch.no_grad():
        got = parallel.forward_features(_images())
        torch.testing.assert_close(
            got, regroup(sequential, branches=2)(_images()), rtol=0, atol=1e-5
        )
    with safe_open(out, framework="pt") as file:
        moved = json.loads(file.metadata()["regrouped"])
    assert (moved["branches"], moved["images"]) == (2, 4)
    assert [row["block"] for row in moved["moved"]] == [1, 2]
    lines = [line.split() for line in said.splitlines()]
    for row, made_of in zip(moved["moved"], ("1-2", "3-4"), strict=True):
        assert 0 < row["mean"] < row["max"] < 0.1
        assert [str(row["block"]), made_of, f"{row['mean']:.1e}", f"{row['max']:.1e}"] in lines


def test_a_depth_that_does_not_divide_is_answered_with_those_that_do(
    deep_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "parallel.safetensors"
    assert main(["export", str(deep_run), str(out), "--regroup", "3"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "4 blocks do not make groups of 3; regroup by one of 1, 2, 4" in message
    assert not out.exists()


@pytest.mark.parametrize("kind", ["missing", "empty", "runs", "no checkpoint"])
def test_what_is_no_run_is_refused_and_nothing_is_written(
    kind: str, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = {"missing": tmp_path / "missing", "empty": tmp_path / "empty",
              "runs": finished_run.parent, "no checkpoint": tmp_path / "started"}[kind]  # fmt: skip
    if folder.parent == tmp_path and kind != "missing":
        folder.mkdir()
    if kind == "no checkpoint":
        shutil.copy(finished_run / "config.yaml", folder)
    out = tmp_path / "encoder.safetensors"
    assert main(["export", str(folder), str(out)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    expected = {"missing": f"there is no {folder}; give a run folder",
                "no checkpoint": f"{folder} has no checkpoint yet"}  # fmt: skip
    assert expected.get(kind, f"{folder} is no run folder") in message
    assert not out.exists()


def test_an_unknown_format_is_answered_with_those_there_are(
    finished_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"there is no export format called 'tim'.*'timm'"):
        export_run(finished_run, format_name="tim", out=tmp_path / "encoder.safetensors")


@pytest.mark.parametrize("name", ["timm", "hf"])
def test_a_file_of_ours_is_exported_as_its_run_would_be(
    name: str, finished_run: Path, tmp_path: Path
) -> None:
    if name == "hf":
        pytest.importorskip("transformers")
    file, out = tmp_path / "ours.safetensors", tmp_path / "out"
    export_run(finished_run, format_name="safetensors", out=file, licence="cc0-1.0")
    done = export_run(file, format_name=name, out=out)
    assert done.report.max_difference <= 1e-5
    exporter = EXPORTERS[name]()
    with torch.no_grad():
        got = exporter.tokens(exporter.load(out), _images())
        torch.testing.assert_close(got, load_run(finished_run)[1](_images()), rtol=0, atol=1e-5)
    card = (out / "README.md" if name == "hf" else tmp_path / "out.md").read_text()
    for said in ("license: cc0-1.0", f"`{sha256(file)}`", "| heldout_loss |", "ours.safetensors"):
        assert said in card


def test_files_that_are_not_exported_say_what_to_do(finished_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.save({"cls_token": torch.zeros(1)}, tmp_path / "theirs.pth")
    ours = tmp_path / "ours.safetensors"
    export_run(finished_run, format_name="safetensors", out=ours)
    export_run(finished_run, format_name="timm", out=tmp_path / "timm.safetensors")
    for path, more, said in (
        (tmp_path / "theirs.pth", {}, r"somebody else's; `mimkit import_weights .*theirs\.pth"),
        (tmp_path / "timm.safetensors", {}, r"'mimkit\.timm\.1'.*for another library"),
        (ours, {"with_head": True}, r"an encoder without a head; leave --with-head out"),
        (ours, {"weights": "average"}, r"one set of weights; leave --weights out"),
        (finished_run, {"with_head": True, "branches": 1}, r"--regroup makes another encoder"),
    ):
        with pytest.raises(UserError, match=said):
            export_run(path, format_name="hf", out=tmp_path / "out", **more)
    assert not (tmp_path / "out").exists()


def test_an_imported_encoder_becomes_another_librarys(tmp_path: Path) -> None:
    """Of images that are no squares, so the embedded ones are given their shape."""
    sizes = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 192, "depth": 1, "num_heads": 3}
    torch.manual_seed(0)
    theirs = VisionTransformer(**sizes, num_classes=0).eval()
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours, out = tmp_path / "ours.safetensors", tmp_path / "back.safetensors"
    words = ["import_weights", str(tmp_path / "theirs.pth"), str(ours), "--image-size", "32x48"]
    assert main(words) == 0
    assert main(["export", str(ours), str(out), "--format", "timm"]) == 0
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        torch.testing.assert_close(load(out)(images), theirs(images), rtol=0, atol=1e-5)
    card = " ".join((tmp_path / "back.safetensors.md").read_text().split())
    assert "is for their authors to say" in card


@pytest.mark.parametrize("name", ["timm", "hf"])
def test_a_finetuned_model_leaves_with_its_classifier_or_as_an_encoder(
    name: str, finished_run: Path, tmp_path: Path
) -> None:
    if name == "hf":
        pytest.importorskip("transformers")
    found = load_encoder(finished_run)
    model = ImageClassifier(found.image_encoder, num_classes=3, pooling="mean")
    model.initialise_head(seed=0, scale=20)
    folder = tmp_path / "best"
    folder.mkdir()
    classes = ("cat", "coffee", "rocket")
    classifier = Classifier(model.eval(), found.normalisation, classes, {"mimkit_run": "tuned"})
    write_classifier(folder, classifier, base=None)
    exporter, out = EXPORTERS[name](), tmp_path / "out"
    words = ["export", str(folder), str(out), "--format", name]
    assert main([*words, "--with-head"]) == 0
    with torch.no_grad():
        got = exporter.logits(exporter.load(out), _images())
        torch.testing.assert_close(got, model(_images()), rtol=0, atol=1e-5)
    card = (out / "README.md" if name == "hf" else tmp_path / "out.md").read_text()
    for said in ("pipeline_tag: image-classification", "| names | cat, coffee, rocket |",
                 "# tuned", "logits = model.eval()"):  # fmt: skip
        assert said in card
    assert main([*words, "--overwrite"]) == 0
    with torch.no_grad():
        got = exporter.tokens(exporter.load(out), _images())
        expected = model.image_encoder(_images())
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
