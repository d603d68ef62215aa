"""Contract of every format: what is loaded back gives the same tokens, or nothing is written."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from cases import HALF, each_format, export, images, make_encoder

from mimkit.errors import UserError
from mimkit.export import EXPORTERS, ExportReport
from mimkit.files import atomic_file, sha256
from mimkit.models.calibration import batch_norms


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


@pytest.mark.parametrize(
    ("name", "stem", "settings"),
    each_format(("hmlp", {}), ("linear", {"layer_scale": None, "qkv_bias": "qkv"}),
                ("levit", {"positions": "none", "final_norm": False})),
)  # fmt: skip
def test_the_export_loads_back_and_is_equal(tmp_path, name, stem, settings) -> None:
    model, path = make_encoder(stem, depth=2, **settings), tmp_path / "out"
    exporter = EXPORTERS[name]()
    report = export(model, path, name)
    assert report.path == path
    assert report.bytes == sum(file.stat().st_size for file in files_of(path))
    _check_files(tmp_path, path, report)
    assert report.images == 4
    assert 0 <= report.max_difference <= report.tolerance == (1e-4 if name == "onnx" else 1e-5)
    assert all(found.mean_difference <= found.max_difference for found in report.comparisons)
    assert min(report.latency.source, report.latency.loaded) > 0
    assert (report.bf16_difference is None) == (not exporter.casts)
    assert model.training
    with torch.no_grad():
        got = exporter.tokens(exporter.load(path), images())
        torch.testing.assert_close(got, model.eval()(images()), rtol=0, atol=report.tolerance)


@pytest.mark.parametrize(("name", "stem"), each_format(("hmlp",), ("conv",), ("linear_bn",)))
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


def _check_files(folder: Path, path: Path, report: ExportReport) -> None:
    """They are named and hashed, those beside the export too, and readable by others."""
    everything = [*files_of(path), *(file for file in folder.iterdir() if file != path)]
    assert report.files == {file.name: sha256(file) for file in everything}
    (folder / "plain").touch()
    assert {file.stat().st_mode for file in everything} == {(folder / "plain").stat().st_mode}


def test_without_a_batch_norm_there_is_nothing_to_fold(tmp_path) -> None:
    with pytest.raises(UserError, match="stem 'linear' has no batch norm"):
        export(make_encoder(), tmp_path / "out", fold=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "wrong"), each_format((1e-3,), (float("nan"),)))
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
        export(make_encoder("hmlp", depth=1), path, name, card=lambda report: "a card",
               overwrite=True)  # fmt: skip
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


@pytest.mark.parametrize("name", ["safetensors", "timm", "hf"])
def test_an_export_is_replaced_only_when_asked_to(tmp_path, name) -> None:
    if name == "hf":
        pytest.importorskip("transformers")
    path, card = tmp_path / "out", lambda report: "written by mimkit"
    first = export(make_encoder("hmlp", depth=1), path, name, card=card)
    names = sorted(file.name for file in tmp_path.iterdir())
    other = make_encoder("hmlp", depth=2)
    with pytest.raises(UserError, match=r"out exists.*--overwrite replaces it"):
        export(other, path, name, card=card)
    assert {file.name: sha256(file) for file in files_of(path)}.items() >= {
        (key, value) for key, value in first.files.items() if not key.startswith("mimkit_stem")
    }
    second = export(other, path, name, card=card, overwrite=True)
    assert second.parameters > first.parameters
    assert sorted(file.name for file in tmp_path.iterdir()) == names, "something was left behind"
    with torch.no_grad():
        got = EXPORTERS[name]().tokens(EXPORTERS[name]().load(path), images())
        torch.testing.assert_close(got, other.eval()(images()), rtol=0, atol=1e-5)


def test_an_interrupted_export_is_simply_run_again(tmp_path, monkeypatch) -> None:
    """What lies beside the file is written first, the file itself last."""
    from mimkit.export import _place

    model, card = make_encoder("hmlp", depth=1), lambda report: "written by mimkit"
    with monkeypatch.context() as patch:
        patch.setattr(_place, "atomic_file", _killed_at_the_end)
        with pytest.raises(KeyboardInterrupt):
            export(model, tmp_path / "out", card=card)
    left = sorted(file.name for file in tmp_path.iterdir())
    assert left == ["mimkit_stem_hmlp.py", "out.md"]
    export(model, tmp_path / "out", card=card)
    assert (tmp_path / "out").is_file()


@contextlib.contextmanager
def _killed_at_the_end(path: Path):
    with atomic_file(path) as temporary:
        yield temporary
        raise KeyboardInterrupt


def test_a_folder_that_is_no_export_is_never_removed(tmp_path, monkeypatch) -> None:
    pytest.importorskip("transformers")
    path, card = tmp_path / "out", lambda report: "written by mimkit"
    model = make_encoder(grid=(2, 2), depth=1)
    path.mkdir()  # an empty one is taken as it is
    export(model, path, "hf", card=card)
    (path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"not only an export of mimkit's \(it has notes\.txt\)"):
        export(model, path, "hf", card=card, overwrite=True)
    (path / "notes.txt").unlink()
    (path / "README.md").write_text("somebody else's model")
    with pytest.raises(UserError, match=r"its README\.md is no card of one"):
        export(model, path, "hf", card=card, overwrite=True)
    (path / "README.md").write_text("written by mimkit")
    before = {file.name: sha256(file) for file in path.iterdir()}
    kind = type(EXPORTERS["hf"]())
    right = kind.tokens
    monkeypatch.setattr(kind, "tokens", lambda *given: right(*given) + 1)
    with pytest.raises(UserError, match="differs from the encoder"):
        export(model, path, "hf", card=card, overwrite=True)
    assert {file.name: sha256(file) for file in path.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_another_stem_file_beside_is_not_written_over(tmp_path) -> None:
    (tmp_path / "mimkit_stem_hmlp.py").write_text("of another version")
    model = make_encoder("hmlp", depth=1)
    with pytest.raises(UserError, match=r"mimkit_stem_hmlp\.py exists and is another one"):
        export(model, tmp_path / "out")
    export(model, tmp_path / "out", overwrite=True)
    assert "class Hmlp" in (tmp_path / "mimkit_stem_hmlp.py").read_text()
