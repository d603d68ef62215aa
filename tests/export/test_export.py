"""Exported files open in the other library and give the same tokens, or nothing is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mimkit.errors import UserError
from mimkit.export import EXPORTERS
from mimkit.export._names import TIMM_LINEAR, check_equal_names, rename
from mimkit.export.timm import load
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.stems import STEMS

HALF = (0.5, 0.5, 0.5)


def make_encoder(stem: str = "linear", **settings) -> ImageEncoder:
    encoder = Encoder(**{"width": 32, "heads": 4, "depth": 3, "grid": (2, 3), **settings})
    model = ImageEncoder(STEMS[stem](width=32), encoder)
    initialise(model, seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    model.train()(images())  # running statistics move
    return model


def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 48, generator=torch.Generator().manual_seed(2))


def export(model: ImageEncoder, path: Path, name: str = "timm"):
    return EXPORTERS[name]().export(
        model, path, image_BCHW=images(), mean=HALF, std=HALF, metadata={"run": "a test"}
    )


@pytest.mark.parametrize("name", EXPORTERS.names())
@pytest.mark.parametrize("stem", STEMS.names())
@pytest.mark.parametrize(
    "settings",
    [{}, {"layer_scale": None, "qkv_bias": "qkv"}, {"positions": "none", "final_norm": False}],
)
def test_the_file_loads_back_and_is_equal(tmp_path, name, stem, settings) -> None:
    model, path = make_encoder(stem, **settings), tmp_path / "encoder.safetensors"
    report = export(model, path, name)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert report.path == path
    assert report.bytes == path.stat().st_size
    assert report.images == 4
    assert report.max_difference <= report.tolerance == 1e-5
    assert model.training
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    exporter = EXPORTERS[name]()
    with torch.no_grad():
        got = exporter.tokens(exporter.load(path), images())
        torch.testing.assert_close(got, model.eval()(images()), rtol=0, atol=1e-5)


def test_the_metadata_says_how_to_rebuild(tmp_path) -> None:
    path = tmp_path / "encoder.safetensors"
    export(make_encoder("hmlp"), path)
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
    assert said["run"] == "a test"
    assert json.loads(said["image_size"]) == [32, 48]
    assert json.loads(said["mean"]) == json.loads(said["std"]) == [0.5, 0.5, 0.5]
    settings = {"width": 32, "patch_size": 16, "norm": "bn"}
    assert json.loads(said["stem"]) == {"name": "hmlp", "settings": settings}
    assert json.loads(said["timm"])["embed_dim"] == 32


def test_load_gives_the_class_token(tmp_path) -> None:
    model, path = make_encoder("hmlp"), tmp_path / "encoder.safetensors"
    export(model, path)
    with torch.no_grad():
        torch.testing.assert_close(
            load(path)(images()), model.eval()(images())[:, 0], rtol=0, atol=1e-5
        )


WITHOUT_MIMKIT = """
import importlib.abc, json, sys, torch

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mimkit":
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocked())
import timm
from safetensors import safe_open
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

path, expected = sys.argv[1], torch.load(sys.argv[2])
with safe_open(path, framework="pt") as file:
    arguments = json.loads(file.metadata()["timm"])
plain = VisionTransformer(**arguments)
named = timm.create_model("vit_tiny_patch16_224", **arguments)
for model in (plain, named):
    model.load_state_dict(load_file(path))
    with torch.no_grad():
        got = model.eval().forward_features(expected["images"])
    assert (got - expected["tokens"]).abs().max() <= 1e-5
print("equal")
"""


def test_the_linear_stem_needs_no_mimkit(tmp_path) -> None:
    model, path = make_encoder("linear"), tmp_path / "encoder.safetensors"
    export(model, path)
    with torch.no_grad():
        tokens_BND = model.eval()(images())
    torch.save({"images": images(), "tokens": tokens_BND}, tmp_path / "expected.pt")
    command = [sys.executable, "-c", WITHOUT_MIMKIT, path, tmp_path / "expected.pt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"positions": "relative_shared"}, r"encoder\.positions is relative_shared"),
        ({"positions": "relative"}, r"encoder\.positions is relative"),
        ({"branches": 2}, r"encoder\.branches is 2"),
    ],
)
def test_what_timm_cannot_hold_is_refused(tmp_path, settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        export(make_encoder(**settings), tmp_path / "encoder.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", EXPORTERS.names())
@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_a_difference_is_refused_and_leaves_nothing(tmp_path, monkeypatch, name, wrong) -> None:
    tokens = type(EXPORTERS[name]()).tokens

    def disturbed(self, loaded, image_BCHW):
        return tokens(self, loaded, image_BCHW) + wrong

    monkeypatch.setattr(type(EXPORTERS[name]()), "tokens", disturbed)
    path = tmp_path / "encoder.safetensors"
    path.write_text("an earlier export")
    with pytest.raises(UserError, match="differs from the encoder by"):
        export(make_encoder(), path, name)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "an earlier export"


def test_files_that_are_not_ours_are_refused(tmp_path) -> None:
    text, foreign = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    text.write_text("not tensors at all")
    save_file({"a": torch.zeros(1)}, foreign)
    with pytest.raises(UserError, match="cannot read"):
        load(text)
    with pytest.raises(UserError, match="cannot read"):
        load(tmp_path / "missing.safetensors")
    with pytest.raises(UserError, match="says its format is 'None'"):
        load(foreign)


def test_renaming_leaves_nothing_over() -> None:
    weight = torch.zeros(2)
    assert list(rename({"encoder.norm.weight": weight}, TIMM_LINEAR)) == ["norm.weight"]
    with pytest.raises(ValueError, match=r"'encoder\.strange' becomes nothing"):
        rename({"encoder.strange": weight}, TIMM_LINEAR)
    with pytest.raises(ValueError, match=r"unused \['a'\], unfilled \['b'\]"):
        check_equal_names({"a": weight}, {"b": weight})
    with pytest.raises(ValueError, match=r"another shape \['a'\]"):
        check_equal_names({"a": weight}, {"a": torch.zeros(3)})
