"""Encoders out of run folders, and into another library's file, with proof."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import pretrain
from safetensors import safe_open

from mimkit import build
from mimkit.cli import main
from mimkit.config import load_config, to_yaml
from mimkit.encoder_io import export_run, load_run
from mimkit.errors import UserError
from mimkit.export import EXPORTERS
from mimkit.export.timm import load
from mimkit.models.regroup import regroup
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


@pytest.mark.parametrize("name", EXPORTERS.names())
def test_the_exported_encoder_of_a_run_gives_the_same_features(
    name: str, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "encoder.safetensors"
    assert main(["export", str(finished_run), "--format", name, str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    _, encoder, _ = load_run(finished_run)
    with torch.no_grad():
        ours, theirs = encoder(_images()), load(out).forward_features(_images())
    assert float((ours - theirs).abs().max()) <= 1e-5
    assert float(ours.std()) > 0.1


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
    assert [done.report.images for done in reports] == [8, 8]
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
    """A run folder of four blocks, its encoder as initialised."""
    config = load_config(finished_run / "config.yaml", ["encoder.size=Ti4"])
    weights = build.build_model(config, prediction_dim=64).state_dict()
    run = tmp_path / "deep"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config))
    state = checkpoint.Checkpoint(updates=1, position=8, weights=weights, moments={})
    checkpoint.save(run / "checkpoints", state, keep=1)
    return run


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
    assert (moved["branches"], moved["images"]) == (2, 8)
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
    expected = "has no checkpoint yet" if kind == "no checkpoint" else "is no run folder"
    assert f"{folder} {expected}" in message
    assert not out.exists()


def test_an_unknown_format_is_answered_with_those_there_are(
    finished_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"there is no export format called 'tim'.*'timm'"):
        export_run(finished_run, format_name="tim", out=tmp_path / "encoder.safetensors")
