"""Encoders of others give the same tokens after an import, from every kind of file."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import ROOT, command
from layouts import HEADS, HF, TIMM, Layout, images, save, three_things

import mimkit
from mimkit.cli import main
from mimkit.errors import UserError
from mimkit.importing import SCHEMES, Imported, import_weights, their_weights
from mimkit.models.stems.hmlp import Hmlp

KINDS = ("pth", "safetensors")


def check(imported: Imported, layout: Layout) -> None:
    """Recognised, complete, and equal in its numbers; the largest difference is printed."""
    coverage, encoder = imported.coverage, imported.encoder
    assert imported.scheme == layout.scheme
    assert coverage.share == 1
    assert (list(coverage.unused), list(coverage.unfilled)) == ([], [])
    assert set(coverage.left_out) == layout.left_out
    found = {name: getattr(encoder.encoder, name, None) for name in layout.encoder}
    found["final_norm"] = isinstance(encoder.encoder.norm, torch.nn.LayerNorm)
    assert {name: found[name] for name in layout.encoder} == dict(layout.encoder)
    with torch.no_grad():
        ours, theirs = encoder(images(layout)), layout.tokens(images(layout))
    print(f"{layout.scheme}: {(ours - theirs).abs().max():.1e} of {theirs.abs().max():.1f}")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def imported_from(path: Path, layout: Layout) -> Imported:
    square = layout.image_size[0] == layout.image_size[1]
    size = None if square else layout.image_size
    return import_weights(path, heads=layout.heads, image_size=size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", TIMM, ids=lambda make: make.__name__)
def test_tokens_are_those_of_the_authors_model(tmp_path, make, kind) -> None:
    layout = make()
    wrapped = kind == "pth" and layout.wrapped
    path = save(wrapped or layout.weights, tmp_path / f"weights.{kind}")
    imported = imported_from(path, layout)
    check(imported, layout)
    assert (imported.wrapper in layout.wrapped) == bool(wrapped)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", ["hub", *KINDS])
@pytest.mark.parametrize("name", HF)
def test_tokens_are_those_of_transformers(tmp_path, name, kind) -> None:
    layout, model = HF[name]()
    if kind == "hub":
        model.save_pretrained(tmp_path)
        path = tmp_path
    else:
        path = save(layout.weights, tmp_path / f"weights.{kind}")
    # config.json beside the file says the heads
    imported = import_weights(path) if kind == "hub" else imported_from(path, layout)
    check(imported, layout)
    assert imported.prefix == ("beit." if "Masked" in name else "")


@pytest.mark.parametrize(
    "make",
    [make for make in TIMM if make.__name__ in
     ("timm_vit", "timm_parallel", "dinov2", "mae", "beit_pretraining", "beit_finetuned",
      "beit_absolute")],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_tables_are_read_both_ways(tmp_path, make) -> None:
    layout = make()
    imported = imported_from(save(layout.weights, tmp_path / "weights.pth"), layout)
    back = their_weights(imported.encoder, imported.scheme)
    assert set(back) == set(layout.weights) - layout.left_out
    assert all(torch.equal(back[name], layout.weights[name]) for name in back)


def test_hmlp_becomes_the_stem_of_that_name(tmp_path) -> None:
    layout = next(make for make in TIMM if make.__name__ == "three_things_hmlp")()
    imported = imported_from(save(layout.weights, tmp_path / "weights.pth"), layout)
    assert isinstance(imported.encoder.stem, Hmlp)


@pytest.mark.parametrize("prefix", ["module.", "encoder.", "teacher.backbone."])
def test_what_stands_before_the_names_is_found_and_said(tmp_path, prefix) -> None:
    layout = three_things()
    weights = {prefix + name: weight for name, weight in layout.weights.items()}
    imported = imported_from(save(weights, tmp_path / "weights.safetensors"), layout)
    check(imported, layout)
    assert imported.prefix == prefix


def test_heads_are_the_usual_ones_of_the_width(tmp_path) -> None:
    from timm import create_model

    model = create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    imported = import_weights(save(model.state_dict(), tmp_path / "weights.pth"))
    assert (imported.encoder.encoder.heads, imported.encoder.encoder.grid) == (3, (2, 2))
    assert any("3 are usual for a width of 192" in note for note in imported.notes)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_of_keys_is_dropped_if_zero_and_else_makes_a_whole_one(tmp_path, value) -> None:
    layout = next(make for make in TIMM if make.__name__ == "beit_absolute")()
    keys = {f"blocks.{n}.attn.k_bias": torch.full((64,), value) for n in range(3)}
    path = save({**layout.weights, **keys}, tmp_path / "weights.pth")
    encoder = imported_from(path, layout).encoder
    assert encoder.encoder.qkv_bias == ("qkv" if value else "qv")
    with torch.no_grad():  # softmax does not see it
        torch.testing.assert_close(
            encoder(images(layout)), layout.tokens(images(layout)), rtol=0, atol=1e-5
        )


def test_a_weight_under_its_old_and_its_new_name_is_refused(tmp_path) -> None:
    pytest.importorskip("transformers")
    weights = dict(HF["BeitModel"]()[0].weights)
    old = "encoder.layer.0.attention.attention.query.bias"
    weights[old] = weights["layers.0.attention.q_proj.bias"] + 1
    with pytest.raises(UserError, match=r"has the weight .* twice"):
        import_weights(save(weights, tmp_path / "weights.pth"))


def test_half_precision_becomes_float32_and_is_said(tmp_path) -> None:
    layout = three_things()
    weights = {name: w.half() if w.is_floating_point() else w for name, w in layout.weights.items()}
    imported = imported_from(save(weights, tmp_path / "weights.pth"), layout)
    assert {weight.dtype for weight in imported.encoder.parameters()} == {torch.float32}
    assert "weights were float16 in the file and are float32 now" in imported.notes


def test_weights_of_the_older_layout_of_torch_are_read(tmp_path) -> None:
    layout = three_things()
    torch.save(dict(layout.weights), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    check(imported_from(tmp_path / "w.pth", layout), layout)


def test_the_command_writes_what_load_encoder_opens(tmp_path, capsys) -> None:
    layout = next(make for make in TIMM if make.__name__ == "beit_pretraining")()
    path, out = save(layout.wrapped, tmp_path / "beit.pth"), tmp_path / "encoder.safetensors"
    assert main(["import_weights", str(path), str(out)]) == 0
    encoder = mimkit.load_encoder(out)
    with torch.no_grad():
        ours = encoder.forward_features(images(layout))
        torch.testing.assert_close(ours, layout.tokens(images(layout)), rtol=0, atol=1e-5)
    assert encoder.about["scheme"] == "beit"
    said = capsys.readouterr().out
    for part in (
        "scheme: beit, unilm's BEiT and BEiT v2, and timm's Beit, under 'model'",
        f"width 64, {HEADS} heads, 3 blocks of 1 branch, stem linear, patches of 16 pixels, 4x4",
        "coverage: 100.0%; used 51 of 51 weights of theirs, filled 51 of 51 of ours",
        "left out (the head of pretraining): lm_head.weight, lm_head.bias",
        "pixels: mean [0.5, 0.5, 0.5], std [0.5, 0.5, 0.5] (the scheme's default; --mean",
        "sha256: ",
    ):
        assert part in said, said


def test_the_door_opens(tmp_path) -> None:
    ended = command([ROOT / "tools" / "import_weights.py", "none.pth", "out"], cwd=tmp_path)
    assert (ended.code, "there is no file none.pth" in ended.err) == (2, True)


def test_pixels_are_the_schemes_unless_they_are_given(tmp_path, capsys) -> None:
    path = save(three_things().weights, tmp_path / "weights.pth")
    words = ["import_weights", str(path), str(tmp_path / "out.safetensors"), "--heads", str(HEADS)]
    given = ["--mean", "0.1", "0.2", "0.3", "--std", "0.4", "0.5", "0.6"]
    for more, mean, said in (([], SCHEMES["3things"].pixels[0], "default"),
                             (given, (0.1, 0.2, 0.3), "as given")):  # fmt: skip
        assert main([*words, "--overwrite", *more]) == 0
        pixels = mimkit.load_encoder(tmp_path / "out.safetensors").normalisation
        assert pixels.mean == mean
        assert said in capsys.readouterr().out


def test_an_import_replaces_a_file_only_when_asked_to(tmp_path, capsys) -> None:
    path, out = save(three_things().weights, tmp_path / "weights.pth"), tmp_path / "out.safetensors"
    out.write_text("an earlier one")
    (tmp_path / "out.safetensors.md").write_text("its card, written by mimkit")
    words = ["import_weights", str(path), str(out), "--heads", str(HEADS)]
    assert main(words) == 2
    assert "exists; --overwrite replaces it" in " ".join(capsys.readouterr().err.split())
    assert out.read_text() == "an earlier one"
    assert main([*words, "--overwrite"]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.safetensors", "weights.pth"]
