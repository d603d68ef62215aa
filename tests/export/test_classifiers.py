"""A finetuned classifier leaves with its head: the same logits in every library, or a refusal."""

import json

import pytest
import torch
from cases import WHOLE_MATRIX, disturb, export, formats, images, make_encoder, writes_graph
from safetensors import safe_open

from mimkit.errors import UserError
from mimkit.export import EXPORTERS
from mimkit.export._headed import EncoderWithClassifier
from mimkit.models.classifier import ImageClassifier

NAMES = ("ant", "bee", "cat", "dog", "eel")
PLAIN = {"layer_scale": None, "qkv_bias": "qkv"}
HOLDING = [one for one in formats() if EXPORTERS[one.values[0]]().holds_classifier]


def classifier(stem: str, *, pooling: str, classes=NAMES, **settings) -> EncoderWithClassifier:
    encoder = make_encoder(stem, **{"grid": (2, 2), "depth": 1, **settings}).eval()
    model = ImageClassifier(encoder, num_classes=5, pooling=pooling)
    model.initialise_head(seed=0, scale=20)
    disturb(model)
    return EncoderWithClassifier(model, classes=classes).eval()


def _cells() -> list:
    encoders = {"mean": ("linear", PLAIN), "cls": ("hmlp", {"branches": 2, "final_norm": False})}
    return [
        pytest.param(*one.values, pooling, *encoder, marks=one.marks)
        for one in HOLDING
        for pooling, in_turn in encoders.items()
        for encoder in encoders.values()
        if WHOLE_MATRIX or encoder is in_turn or not writes_graph(*one.values)
    ]


@pytest.mark.parametrize(("name", "pooling", "stem", "settings"), _cells())
def test_logits_are_those_of_the_classifier(tmp_path, name, pooling, stem, settings) -> None:
    model, exporter = classifier(stem, pooling=pooling, **settings), EXPORTERS[name]()
    report = export(model, tmp_path / "out", name)
    assert report.max_difference <= report.tolerance
    with torch.no_grad():
        expected_BV = model.logits(images((2, 2)))
        got_BV = exporter.logits(exporter.load(tmp_path / "out"), images((2, 2)))
    assert expected_BV.shape == (4, 5)
    assert float(expected_BV.std()) > 0.1
    torch.testing.assert_close(got_BV, expected_BV, rtol=0, atol=10 * report.tolerance)
    assert "logits" in report.usage


@pytest.mark.parametrize(
    ("settings", "pooling", "expected"),
    [
        (PLAIN, "cls", "ViTForImageClassification"),
        (PLAIN, "mean", "BeitForImageClassification"),  # ViT's has no mean
        ({"positions": "relative"}, "mean", "BeitForImageClassification"),
        ({"positions": "relative", "final_norm": False}, "cls", "BeitForImageClassification"),
        ({"branches": 2}, "cls", "MimkitForImageClassification"),
    ],
)
def test_transformers_own_class_where_there_is_one(tmp_path, settings, pooling, expected) -> None:
    pytest.importorskip("transformers")
    model = classifier("linear", pooling=pooling, **settings)
    assert export(model, tmp_path / "out", "hf").architecture == expected
    config = EXPORTERS["hf"]().load(tmp_path / "out").config
    assert config.id2label == dict(enumerate(NAMES))
    assert config.label2id["eel"] == 4


@pytest.mark.parametrize("positions", ["absolute", "relative"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_timms_own_classes_pool_and_classify(tmp_path, positions, pooling) -> None:
    model = classifier("linear", pooling=pooling, positions=positions)
    report = export(model, tmp_path / "out", "timm")
    assert report.architecture == ("Beit" if positions == "relative" else "VisionTransformer")
    with safe_open(tmp_path / "out", framework="pt") as file:
        said = file.metadata()
    assert json.loads(said["classes"]) == list(NAMES)
    arguments = json.loads(said["timm"])
    pool = {"mean": "avg", "cls": "token"}[pooling]
    assert (arguments["num_classes"], arguments["global_pool"]) == (5, pool)


def test_classes_without_names_are_numbered(tmp_path) -> None:
    pytest.importorskip("transformers")
    export(classifier("linear", pooling="mean", classes=()), tmp_path / "out", "hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"]["4"] == "LABEL_4"
    with pytest.raises(ValueError, match="2 names for a head of 5 classes"):
        classifier("linear", pooling="mean", classes=("a", "b"))


def test_wrong_logits_are_refused_in_units_of_the_largest(tmp_path, monkeypatch) -> None:
    kind, model = type(EXPORTERS["timm"]()), classifier("linear", pooling="mean")
    with torch.no_grad():
        model.head.weight.mul_(1000)  # rounding alone is beyond 1e-5 then, and no error
    assert export(model, tmp_path / "good", "timm").max_difference <= 1e-5
    right = kind.logits
    monkeypatch.setattr(kind, "logits", lambda *given: right(*given) * (1 + 1e-4))
    with pytest.raises(UserError, match=r"differs from the encoder by .*e-0"):
        export(model, tmp_path / "bad", "timm")
    assert not (tmp_path / "bad").exists()


def test_our_own_format_refuses_and_says_where_the_classifier_is(tmp_path) -> None:
    with pytest.raises(UserError, match=r"take --format timm, hf, onnx or pt2.*folder `best`"):
        export(classifier("linear", pooling="mean"), tmp_path / "out", "safetensors")
    assert list(tmp_path.iterdir()) == []
