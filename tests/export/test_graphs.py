"""onnx and pt2: any batch, baked positions, and what a graph cannot hold."""

import importlib

import pytest
import torch
from cases import export, formats, images, make_encoder, writes_graph

from mimkit.errors import UserError
from mimkit.export import EXPORTERS
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.resize import resized
from mimkit.models.stems import STEMS


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in formats() if writes_graph(*one.values)])
@pytest.mark.parametrize("grid", [(2, 3), (4, 2)])
def test_positions_are_baked_at_the_chosen_size_and_any_batch_runs(tmp_path, name, grid) -> None:
    source = make_encoder("levit", positions="relative", depth=1).eval()
    model = resized(source, grid)
    exporter = EXPORTERS[name]()
    report = export(model, tmp_path / "out", name)
    assert [(f.height, f.width) for f in report.comparisons] == [(16 * grid[0], 16 * grid[1])]
    loaded = exporter.load(tmp_path / "out")
    for batch in (1, 2, 7):
        pixels = images(grid, num=batch)
        with torch.no_grad():
            got = exporter.tokens(loaded, pixels)
            torch.testing.assert_close(got, model(pixels), rtol=0, atol=exporter.tolerance)


@pytest.mark.slow
def test_an_onnx_file_names_its_input_and_output_and_carries_the_metadata(tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    export(make_encoder("hmlp", depth=1), tmp_path / "out", "onnx")
    session = onnxruntime.InferenceSession(
        (tmp_path / "out").read_bytes(), providers=["CPUExecutionProvider"]
    )
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    assert (given.name, made.name) == ("image", "tokens")
    assert given.shape[1:] == [3, 32, 48]
    assert isinstance(given.shape[0], str)
    said = session.get_modelmeta().custom_metadata_map
    assert said["run"] == "a test"
    assert said["mean"] == "[0.5, 0.5, 0.5]"


def test_onnx_refuses_what_protobuf_cannot_hold() -> None:
    """ViT-H has 632 M weights."""
    with torch.device("meta"):
        stem = STEMS["linear"](width=1280, patch_size=14)
        encoder = Encoder(width=1280, heads=16, depth=32, grid=(2, 2))
    with pytest.raises(UserError, match=r"2\.3 GiB of weights.*take --format pt2"):
        EXPORTERS["onnx"]().architecture(ImageEncoder(stem, encoder))


@pytest.mark.parametrize(
    ("name", "missing"),
    [(name, package) for name in EXPORTERS.names() for package in EXPORTERS[name]().packages],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    tmp_path, monkeypatch, name, missing
) -> None:
    for package in EXPORTERS[name]().packages:
        pytest.importorskip(package)  # the first that is not there would be named
    real = importlib.import_module

    def absent(wanted: str):
        if wanted == missing:
            raise ModuleNotFoundError(f"No module named '{wanted}'", name=wanted)
        return real(wanted)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UserError, match=rf"package '{missing}'.*pip install 'mimkit\[export\]'"):
        export(make_encoder(), tmp_path / "out", name)
    assert list(tmp_path.iterdir()) == []
