"""Folders for transformers: its own classes where they fit, else a modelling file of ours."""

import json
import re

import pytest
import torch
from cases import disturb, export, images, make_encoder
from PIL import Image

from mimkit.batch import normalise
from mimkit.encoder_io import load_encoder
from mimkit.errors import UserError
from mimkit.export import EXPORTERS
from mimkit.export._headed import EncoderWithHead
from mimkit.models.encoder import Encoder
from mimkit.models.init import initialise
from mimkit.models.mim import MaskedImageModel
from mimkit.models.stems import STEMS

transformers = pytest.importorskip("transformers")
SQUARE = {"grid": (2, 2)}


def with_head(**settings) -> EncoderWithHead:
    encoder = Encoder(width=32, heads=4, depth=2, grid=(2, 2), **settings)
    model = MaskedImageModel(stem=STEMS["linear"](width=32), encoder=encoder, prediction_dim=11)
    initialise(model, seed=0)
    disturb(model)
    return EncoderWithHead(model.eval())


@pytest.mark.parametrize(
    ("stem", "settings", "expected"),
    [
        ("linear", SQUARE, "BeitModel"),
        ("linear", {**SQUARE, "positions": "relative"}, "BeitModel"),
        ("linear", {**SQUARE, "layer_scale": None, "qkv_bias": "qkv"}, "ViTModel"),
        ("linear", {**SQUARE, "positions": "none", "qkv_bias": "qkv"}, "BeitModel"),
        ("linear", {}, "MimkitModel"),  # 2x3 patches
        ("linear", {**SQUARE, "branches": 2}, "MimkitModel"),
        ("linear", {**SQUARE, "final_norm": False}, "MimkitModel"),
        ("hmlp", {**SQUARE, "positions": "relative_shared"}, "MimkitModel"),
        ("local", SQUARE, "MimkitModel"),
    ],
)
def test_the_class_is_transformers_own_where_it_fits(tmp_path, stem, settings, expected) -> None:
    model, path = make_encoder(stem, **settings), tmp_path / "model"
    report = export(model, path, "hf")
    assert report.architecture == expected
    loaded = EXPORTERS["hf"]().load(path)
    assert type(loaded).__name__ == expected
    shown = {"MimkitModel": {"modeling_mimkit.py"}}.get(expected, set())
    assert {file.name for file in path.iterdir()} == shown | {
        "config.json", "model.safetensors", "preprocessor_config.json"
    }  # fmt: skip


def test_a_gelu_behind_the_patches_is_not_lost(tmp_path) -> None:
    model = make_encoder("linear", stem_settings={"gelu": True}, **SQUARE)
    assert export(model, tmp_path / "model", "hf").architecture == "MimkitModel"


@pytest.mark.parametrize("positions", ["absolute", "relative", "relative_shared"])
def test_the_head_predicts_the_same_words(tmp_path, positions) -> None:
    model, path = with_head(positions=positions), tmp_path / "model"
    report = export(model, path, "hf")
    assert report.architecture == "BeitForMaskedImageModeling"
    loaded = transformers.BeitForMaskedImageModeling.from_pretrained(path).eval()
    mask_BN = torch.tensor([[True, False, False, True]]).expand(4, -1)
    with torch.no_grad():
        got = loaded(images((2, 2)), bool_masked_pos=mask_BN).logits[mask_BN]
        expected = model.predictions(images((2, 2)), mask_BN)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        unmasked = model.head(model(images((2, 2)))[:, 1:])[mask_BN]
    assert expected.shape == (8, 11)
    assert not torch.allclose(expected, unmasked, atol=1e-2)


def test_the_encoder_of_a_model_with_head_loads_without_it(tmp_path) -> None:
    """BeitModel finds the encoder's weights in BeitForMaskedImageModeling's file; the norm is the
    head's there."""
    export(with_head(), tmp_path / "model", "hf")
    _, info = transformers.BeitModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert {name for name in info["missing_keys"] if "layernorm" not in name} == set()


@pytest.mark.parametrize("name", [name for name in EXPORTERS.names() if name != "hf"])
def test_other_formats_refuse_a_head(tmp_path, name) -> None:
    with pytest.raises(UserError, match=r"leave --with-head out, or take --format hf"):
        export(with_head(), tmp_path / "model", name)
    assert list(tmp_path.iterdir()) == []


def test_a_head_needs_transformers_own_class(tmp_path) -> None:
    with pytest.raises(UserError, match=r"BeitForMaskedImageModeling cannot have blocks of 2"):
        export(with_head(branches=2), tmp_path / "model", "hf")


def test_wrong_predictions_are_refused(tmp_path, monkeypatch) -> None:
    kind = type(EXPORTERS["hf"]())
    right = kind.predictions
    monkeypatch.setattr(kind, "predictions", lambda *given: right(*given) + 1e-3)
    with pytest.raises(UserError, match=r"differs from the encoder by 0\.001"):
        export(with_head(), tmp_path / "model", "hf")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_transformers_did_not_find_are_an_error(tmp_path, monkeypatch) -> None:
    """It would fill them with noise and go on."""
    from mimkit.export import hf

    full = hf.split_qkv
    monkeypatch.setattr(
        hf, "split_qkv",
        lambda *given, **more: {n: w for n, w in full(*given, **more).items() if "cls" not in n},
    )  # fmt: skip
    with pytest.raises(UserError, match=r"did not load .* whole.*cls_token"):
        export(make_encoder(**SQUARE), tmp_path / "model", "hf")
    assert list(tmp_path.iterdir()) == []


def test_the_modelling_file_says_nothing_of_mimkit_in_its_imports(tmp_path) -> None:
    export(make_encoder("hmlp"), tmp_path / "model", "hf")
    text = (tmp_path / "model" / "modeling_mimkit.py").read_text()
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
    assert "torch" in imported
    assert "mimkit" not in imported


def test_a_folder_of_ours_is_also_an_encoder_of_ours(tmp_path) -> None:
    model = make_encoder("hmlp", positions="relative").eval()
    export(model, tmp_path / "model", "hf")
    encoder = load_encoder(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(encoder.forward_features(images()), model(images()))


def test_the_configuration_and_the_hidden_states_are_transformers_way(tmp_path) -> None:
    model = make_encoder("hmlp").eval()
    export(model, tmp_path / "model", "hf")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert config.stem["norm"] == "bn"
    assert json.loads((tmp_path / "model" / "config.json").read_text())["encoder"]["depth"] == 3
    loaded = EXPORTERS["hf"]().load(tmp_path / "model")
    with torch.no_grad():
        output = loaded(images(), output_hidden_states=True)
        assert torch.equal(output.pooler_output, output.last_hidden_state[:, 0])
        expected = model.intermediates(images(), [1, 2, 3])
    assert len(output.hidden_states) == 3
    assert all(map(torch.equal, output.hidden_states, expected))


@pytest.mark.parametrize("grid", [(2, 2), (2, 3)])
def test_the_preprocessor_normalises_as_training_did(tmp_path, grid) -> None:
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    export(make_encoder(grid=grid), tmp_path / "model", "hf", mean=mean, std=std)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
    pixels = torch.randint(256, (3, *(16 * side for side in grid)), dtype=torch.uint8)
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    got = processor(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(got, normalise(pixels, mean=mean, std=std), rtol=0, atol=1e-5)
    wide = processor(image.resize((96, 40)), return_tensors="pt")["pixel_values"]
    assert wide.shape[2:] == pixels.shape[1:]


@pytest.mark.parametrize("settings", [{}, {"layer_scale": None, "qkv_bias": "qkv"}])
def test_layer_norms_have_our_eps_and_not_transformers_default(tmp_path, settings) -> None:
    """1e-6, not 1e-12; on tokens of little variance that shows."""
    model, path = make_encoder(**SQUARE, **settings).eval(), tmp_path / "model"
    with torch.no_grad():
        model.stem.project.weight.mul_(1e-3)
        model.stem.project.bias.zero_()
        for token in (model.encoder.cls_token, model.encoder.pos_embed):
            token.zero_()
    export(model, path, "hf")
    config = json.loads((path / "config.json").read_text())
    assert config["layer_norm_eps"] == 1e-6
    loaded = EXPORTERS["hf"]().load(path)
    norms = [module for module in loaded.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert {norm.eps for norm in norms} == {1e-6}
    with torch.no_grad():
        right = loaded(pixel_values=images((2, 2))).last_hidden_state
        for norm in norms:
            norm.eps = 1e-12
        wrong = loaded(pixel_values=images((2, 2))).last_hidden_state
    assert float((right - wrong).abs().max()) > 1e-3


def test_our_modelling_file_refuses_images_in_words(tmp_path) -> None:
    export(make_encoder("hmlp", depth=1), tmp_path / "model", "hf")
    loaded = EXPORTERS["hf"]().load(tmp_path / "model")
    with pytest.raises(ValueError, match=r"33x32 pixels, which do not divide into patches of 16"):
        loaded(pixel_values=torch.zeros(1, 3, 33, 32))
