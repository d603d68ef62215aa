"""Exported files open in the other library and give the same tokens, or nothing is written."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import Block, ParallelThingsBlock, VisionTransformer

from mimkit.errors import UserError
from mimkit.export import EXPORTERS
from mimkit.export._names import TIMM_TOKENS, check_equal_names, rename
from mimkit.export.timm import load, load_timm_weights
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.regroup import regroup
from mimkit.models.stems import STEMS

HALF = (0.5, 0.5, 0.5)


def make_encoder(stem: str = "linear", **settings) -> ImageEncoder:
    encoder = Encoder(**{"width": 32, "heads": 4, "depth": 3, "grid": (2, 3), **settings})
    model = ImageEncoder(STEMS[stem](width=32), encoder)
    initialise(model, seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # more, and the stem's own rounding comes near 1e-5
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
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


@pytest.mark.parametrize("stem", ["linear", "hmlp"])
@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"layer_scale": None, "qkv_bias": "qkv"}])
def test_branches_become_timms_parallel_blocks(tmp_path, stem, branches, settings) -> None:
    model, path = make_encoder(stem, branches=branches, **settings), tmp_path / "a.safetensors"
    assert export(model, path).max_difference <= 1e-5
    loaded = load(path)
    assert {type(block) for block in loaded.blocks} == {
        Block if branches == 1 else ParallelThingsBlock
    }
    assert len(loaded.blocks) == 3
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
    assert ("block" in said) == (branches > 1)
    if branches > 1:
        block = {"name": "ParallelThingsBlock", "num_parallel": branches}
        assert json.loads(said["block"]) == block


def test_a_regrouped_encoder_is_exported_like_any_parallel_one(tmp_path) -> None:
    sequential, path = make_encoder(depth=4).eval(), tmp_path / "a.safetensors"
    grouped = regroup(sequential, branches=2)
    export(grouped, path)
    with torch.no_grad():
        got = load(path).forward_features(images())
        torch.testing.assert_close(got, grouped(images()), rtol=0, atol=1e-5)
        assert not torch.allclose(got, sequential(images()), atol=1e-3)


def test_blocks_of_another_name_are_refused(tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    export(make_encoder(branches=2), path)
    with safe_open(path, framework="pt") as file:
        said = {**file.metadata(), "block": json.dumps({"name": "Other", "num_parallel": 2})}
    save_file(load_file(path), path, said)
    with pytest.raises(UserError, match=r"blocks 'Other'.*'ParallelThingsBlock'"):
        load(path)


def timm_model(branches: int, **settings) -> VisionTransformer:
    """Like timm's vit_small_patch16_18x2_224, but small; every weight away from where it starts."""
    block = partial(ParallelThingsBlock, num_parallel=branches) if branches > 1 else Block
    sizes = {"img_size": (32, 48), "embed_dim": 32, "depth": 3, "num_heads": 4, "init_values": 1e-5}
    model = VisionTransformer(**{**sizes, "num_classes": 0, "block_fn": block, **settings})
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model.eval()


@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("init_values", [1e-5, None])
def test_timms_weights_give_the_same_here_and_back(tmp_path, branches, init_values) -> None:
    theirs = timm_model(branches, init_values=init_values)
    ours = make_encoder(qkv_bias="qkv", layer_scale=init_values, branches=branches).eval()
    load_timm_weights(ours, theirs.state_dict())
    with torch.no_grad():
        expected = theirs.forward_features(images())
        torch.testing.assert_close(ours(images()), expected, rtol=0, atol=1e-5)
    export(ours, tmp_path / "back.safetensors")
    back, state = load_file(tmp_path / "back.safetensors"), theirs.state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in back)


@pytest.mark.parametrize("branches", [1, 2])
def test_an_exported_file_is_read_back_with_any_stem(tmp_path, branches: int) -> None:
    model, path = (
        make_encoder("hmlp", qkv_bias="qkv", branches=branches),
        tmp_path / "a.safetensors",
    )
    export(model, path)
    again = ImageEncoder(
        STEMS["hmlp"](width=32),
        Encoder(width=32, heads=4, depth=3, grid=(2, 3), qkv_bias="qkv", branches=branches),
    )
    load_timm_weights(again, load_file(path))
    assert all(torch.equal(again.state_dict()[n], w) for n, w in model.state_dict().items())


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({}, {"num_classes": 5}, r"unused \['head\.bias', 'head\.weight'\].*num_classes=0"),
        ({"depth": 4}, {}, r"unused \[\], unfilled \['blocks\.3\.attns\.0\.attn"),
        ({"layer_scale": None}, {}, r"unused \['blocks\.0\.attns\.0\.ls\.gamma'"),
        ({"branches": 1}, {}, r"unused \['blocks\.0\.attns.*unfilled \['blocks\.0\.attn\."),
        ({"grid": (2, 2)}, {}, r"of another shape \['pos_embed'\].*image size"),
        ({"qkv_bias": "qv"}, {}, r"encoder\.qkv_bias is qv.*encoder\.qkv_bias=qkv"),
    ],
)
def test_timms_weights_that_do_not_fit_are_named_and_none_is_set(ours, theirs, message) -> None:
    settings = {"width": 32, "heads": 4, "depth": 3, "grid": (2, 3), "branches": 2}
    encoder = Encoder(**{**settings, "qkv_bias": "qkv", **ours})
    model = ImageEncoder(STEMS["linear"](width=32), encoder)
    initialise(model, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_timm_weights(model, timm_model(2, **theirs).state_dict())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_metadata_says_how_to_rebuild(tmp_path) -> None:
    path = tmp_path / "encoder.safetensors"
    export(make_encoder("hmlp"), path)
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
    assert said["run"] == "a test"
    assert json.loads(said["image_size"]) == [32, 48]
    assert json.loads(said["mean"]) == json.loads(said["std"]) == [0.5, 0.5, 0.5]
    settings = STEMS["hmlp"](width=32).settings
    assert settings.items() >= {"width": 32, "patch_size": 16, "norm": "bn"}.items()
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
from functools import partial
import timm
from safetensors import safe_open
from safetensors.torch import load_file
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer

path, expected = sys.argv[1], torch.load(sys.argv[2])
with safe_open(path, framework="pt") as file:
    metadata = file.metadata()
arguments = json.loads(metadata["timm"])
if "block" in metadata:
    block = json.loads(metadata["block"])
    assert block["name"] == "ParallelThingsBlock"
    arguments["block_fn"] = partial(ParallelThingsBlock, num_parallel=block["num_parallel"])
plain = VisionTransformer(**arguments)
named = timm.create_model("vit_tiny_patch16_224", **arguments)
for model in (plain, named):
    model.load_state_dict(load_file(path))
    with torch.no_grad():
        got = model.eval().forward_features(expected["images"])
    assert (got - expected["tokens"]).abs().max() <= 1e-5
print("equal")
"""


@pytest.mark.parametrize("branches", [1, 2])
def test_the_linear_stem_needs_no_mimkit(tmp_path, branches: int) -> None:
    model, path = make_encoder("linear", branches=branches), tmp_path / "encoder.safetensors"
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
        ({"positions": "relative", "branches": 2}, r"encoder\.positions is relative"),
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
    assert list(rename({"encoder.norm.weight": weight}, TIMM_TOKENS)) == ["norm.weight"]
    with pytest.raises(ValueError, match=r"'encoder\.strange' becomes nothing"):
        rename({"encoder.strange": weight}, TIMM_TOKENS)
    with pytest.raises(ValueError, match=r"unused \['a'\], unfilled \['b'\]"):
        check_equal_names({"a": weight}, {"b": weight})
    with pytest.raises(ValueError, match=r"another shape \['a'\]"):
        check_equal_names({"a": weight}, {"a": torch.zeros(3)})
