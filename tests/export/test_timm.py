"""timm's own classes, made of an exported file, and their weights in an encoder of ours."""

import json
from functools import partial

import pytest
import torch
from cases import export, images, make_encoder
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models.beit import Beit
from timm.models.vision_transformer import Block, ParallelThingsBlock, VisionTransformer

from mimkit.errors import UserError
from mimkit.export._names import check_equal_names, rename
from mimkit.export.timm import load, load_timm_weights
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.regroup import regroup
from mimkit.models.resize import resized
from mimkit.models.stems import STEMS
from mimkit.weight_names import TOKENS


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


def test_load_gives_the_class_token(tmp_path) -> None:
    model, path = make_encoder("hmlp"), tmp_path / "encoder.safetensors"
    export(model, path)
    with torch.no_grad():
        torch.testing.assert_close(
            load(path)(images()), model.eval()(images())[:, 0], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("positions", ["relative", "relative_shared"])
@pytest.mark.parametrize("settings", [{}, {"layer_scale": None, "qkv_bias": "qkv"}])
def test_relative_positions_become_timms_beit(tmp_path, positions, settings) -> None:
    """Its keys have no bias; with `qkv` ours has one, which softmax does not see."""
    model, path = make_encoder(positions=positions, **settings).eval(), tmp_path / "a.safetensors"
    report = export(model, path)
    assert report.architecture == "Beit"
    loaded = load(path)
    assert type(loaded) is Beit
    assert (loaded.rel_pos_bias is not None) == (positions == "relative_shared")
    with torch.no_grad():
        got = loaded.forward_features(images())
        torch.testing.assert_close(got, model(images()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("stem", "settings", "message"),
    [
        (
            "hmlp",
            {},
            r"encoder\.positions is relative, .*no place for the stem 'hmlp'.*safetensors",
        ),
        ("linear_bn", {}, r"no place for the stem 'linear_bn'.*add --fold"),
        ("linear", {"branches": 2}, r"that has no blocks of 2 branches\. To mend it: take"),
        ("linear", {"final_norm": False}, r"always a norm after the last block"),
    ],
)
def test_what_timm_cannot_hold_is_refused(tmp_path, stem, settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        export(make_encoder(stem, positions="relative", **settings), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_layer_scale_that_starts_at_zero_is_kept(tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    export(make_encoder(layer_scale=0.0), path)
    assert "blocks.0.ls1.gamma" in load_file(path)


def test_another_size_is_timms_own_matter_and_gives_the_same(tmp_path) -> None:
    model, path = make_encoder("hmlp").eval(), tmp_path / "a.safetensors"
    export(model, path)
    loaded = load(path)
    loaded.set_input_size((64, 80))
    with torch.no_grad():
        got = loaded.forward_features(images((4, 5)))
        torch.testing.assert_close(got, resized(model, (4, 5))(images((4, 5))), rtol=0, atol=1e-5)


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
    assert list(rename({"encoder.norm.weight": weight}, TOKENS)) == ["norm.weight"]
    with pytest.raises(ValueError, match=r"'encoder\.strange' becomes nothing"):
        rename({"encoder.strange": weight}, TOKENS)
    with pytest.raises(ValueError, match=r"unused \['a'\], unfilled \['b'\]"):
        check_equal_names({"a": weight}, {"b": weight})
    with pytest.raises(ValueError, match=r"another shape \['a'\]"):
        check_equal_names({"a": weight}, {"a": torch.zeros(3)})


def test_a_stem_in_timm_names_set_input_size(tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    report = export(make_encoder("hmlp", depth=1), path)
    assert "model.set_input_size((height, width))" in report.usage
    said = r"of 64x80 pixels.*call model\.set_input_size\(\(64, 80\)\)"
    with pytest.raises(ValueError, match=said):
        load(path)(images((4, 5)))
