"""Encoders out of run folders, and into another library's file, with proof."""

import shutil
from pathlib import Path

import pytest
import torch

from mimkit.cli import main
from mimkit.encoder_io import export_run, load_run
from mimkit.errors import UserError
from mimkit.export import EXPORTERS
from mimkit.export.timm import load
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
    assert [report.images for report in reports] == [8, 8]
    assert all(report.max_difference <= 1e-5 for report in reports)


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
