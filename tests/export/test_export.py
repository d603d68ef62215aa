"""Contract of every format: what is loaded back gives the same tokens, or nothing is written."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from cases import HALF, export, formats, images, make_encoder

from mimkit.errors import UserError
from mimkit.export import EXPORTERS, ExportReport
from mimkit.files import sha256
from mimkit.models.calibration import batch_norms


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize(
    ("stem", "settings"),
    [("hmlp", {}), ("linear", {"layer_scale": None, "qkv_bias": "qkv"}),
     ("levit", {"positions": "none", "final_norm": False})],
)  # fmt: skip
def test_the_export_loads_back_and_is_equal(tmp_path, name, stem, settings) -> None:
    model, path, exporter = make_encoder(stem, **settings), tmp_path / "out", EXPORTERS[name]()
    report = export(model, path, name)
    assert report.path == path
    assert report.bytes == sum(file.stat().st_size for file in files_of(path))
    assert report.images == 4
    assert 0 <= report.max_difference <= report.tolerance == (1e-4 if name == "onnx" else 1e-5)
    assert all(found.mean_difference <= found.max_difference for found in report.comparisons)
    assert min(report.latency.source, report.latency.loaded) > 0
    assert (report.bf16_difference is None) == (not exporter.casts)
    assert model.training
    with torch.no_grad():
        got = exporter.tokens(exporter.load(path), images())
        torch.testing.assert_close(got, model.eval()(images()), rtol=0, atol=report.tolerance)


@pytest.mark.parametrize("name", formats())
def test_files_are_named_hashed_and_readable_by_others(tmp_path, name) -> None:
    path = tmp_path / "out"
    report = export(make_encoder("hmlp"), path, name)
    beside = [file for file in tmp_path.iterdir() if file != path]
    everything = {file.name: sha256(file) for file in (*files_of(path), *beside)}
    assert report.files == everything
    (tmp_path / "plain").touch()
    modes = {file.stat().st_mode for file in (*files_of(path), *beside)}
    assert modes == {(tmp_path / "plain").stat().st_mode}


@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize("stem", ["hmlp", "conv", "linear_bn"])
def test_a_folded_stem_has_no_batch_norm_and_equals_the_one_it_was(tmp_path, name, stem) -> None:
    model = make_encoder(stem, depth=1).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = export(model, tmp_path / "out", name, fold=True)
    assert report.max_difference <= report.tolerance
    assert report.parameters == sum(p.numel() for p in model.parameters()) - sum(
        # scale and shift go; a convolution that had no bias gets one instead of the shift
        p.numel()
        for norm in batch_norms(model.stem)
        for p in (norm.weight,)
    ) - (0 if stem == "conv" else sum(norm.bias.numel() for norm in batch_norms(model.stem)))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_without_a_batch_norm_there_is_nothing_to_fold(tmp_path) -> None:
    with pytest.raises(UserError, match="stem 'linear' has no batch norm"):
        export(make_encoder(), tmp_path / "out", fold=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_a_difference_is_refused_and_leaves_nothing(tmp_path, monkeypatch, name, wrong) -> None:
    kind = type(EXPORTERS[name]())
    tokens = kind.tokens

    def disturbed(self, loaded, image_BCHW):
        return tokens(self, loaded, image_BCHW) + wrong

    monkeypatch.setattr(kind, "tokens", disturbed)
    path = tmp_path / "out"
    if not kind.is_folder:
        path.write_text("an earlier export")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"differs from the encoder by .* of 32x48, more than"):
        export(make_encoder("hmlp"), path, name, card=lambda report: "a card")
    assert sorted(tmp_path.iterdir()) == before
    assert before == [] or path.read_text() == "an earlier export"


def test_outputs_of_another_shape_are_refused(tmp_path, monkeypatch) -> None:
    kind = type(EXPORTERS["safetensors"]())
    monkeypatch.setattr(kind, "tokens", lambda self, loaded, image: loaded(image))
    with pytest.raises(UserError, match=r"outputs of shape \(4, 32\), the encoder \(4, 7, 32\)"):
        export(make_encoder(), tmp_path / "out", "safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_written_over(tmp_path) -> None:
    path = tmp_path / "out"
    pytest.importorskip("transformers")
    path.mkdir()
    (path / "mine.txt").touch()
    with pytest.raises(UserError, match="exists, and this format writes a whole folder"):
        export(make_encoder(), path, "hf")
    assert [file.name for file in path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["safetensors", "timm", "hf"])
def test_other_sizes_are_compared_where_the_format_takes_them(tmp_path, name) -> None:
    if name == "hf":
        pytest.importorskip("transformers")
    report = export(make_encoder("hmlp"), tmp_path / "out", name)
    assert [(found.height, found.width) for found in report.comparisons] == [
        (32, 48), (48, 48), (16, 64)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["hf", "timm"])
def test_a_card_goes_into_a_folder_or_beside_a_file(tmp_path, name) -> None:
    if name == "hf":
        pytest.importorskip("transformers")
    seen = list[ExportReport]()

    def card(report: ExportReport) -> str:
        seen.append(report)
        return "a card"

    report = export(make_encoder(), tmp_path / "out", name, card=card)
    place = tmp_path / "out" / "README.md" if name == "hf" else tmp_path / "out.md"
    assert place.read_text() == "a card"
    assert seen == [report]
    assert "README.md" not in report.files


@pytest.mark.parametrize("name", ["safetensors", "timm"])
def test_the_metadata_say_how_to_rebuild(tmp_path, name) -> None:
    said = metadata_of(tmp_path, name)
    assert said["run"] == "a test"
    assert json.loads(said["image_size"]) == [32, 48]
    assert json.loads(said["mean"]) == json.loads(said["std"]) == list(HALF)
    settings = {"width": 32, "patch_size": 16, "norm": "bn", "statistics": "all"}
    assert json.loads(said["stem"]) == {"name": "hmlp", "settings": settings}
    sizes = json.loads(said["encoder" if name == "safetensors" else "timm"])
    assert sizes["depth"] == 3


def metadata_of(folder: Path, name: str) -> Mapping[str, str]:
    from safetensors import safe_open

    export(make_encoder("hmlp"), folder / "out", name)
    with safe_open(folder / "out", framework="pt") as file:
        return file.metadata()


def test_a_folder_and_somebody_elses_text_are_not_written_over(tmp_path) -> None:
    """Before anything is written: a card goes beside a file, as NAME.md."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "mine.md").write_text("my notes")
    for name, message in (("taken", "is a folder"), ("mine", "is no model card of mimkit's")):
        with pytest.raises(UserError, match=message):
            EXPORTERS["timm"]().export(
                make_encoder("hmlp").eval(), tmp_path / name, image_BCHW=images((2, 3)), mean=HALF,
                std=HALF, metadata={}, card=lambda report: "written by mimkit",
            )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.md", "taken"]
    assert (tmp_path / "mine.md").read_text() == "my notes"
