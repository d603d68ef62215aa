"""What is not imported: too little of it, what our encoder cannot hold, and files that are not."""

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from layouts import beit_finetuned, beit_pretraining, dinov2, save, timm_vit
from safetensors.torch import save_file

import mimkit
from mimkit.cli import main
from mimkit.errors import UserError
from mimkit.importing import import_weights
from mimkit.importing.schemes import REFUSED


def refused(weights: dict, tmp_path: Path, match: str, **settings) -> None:
    path = save(weights, tmp_path / "weights.pth")
    with pytest.raises(UserError, match=match):
        import_weights(path, **{"heads": 4, **settings})


def test_two_of_211_names_are_an_error_that_lists_them(tmp_path, capsys) -> None:
    weights = {f"backbone.layer{n}.conv.weight": torch.ones(1) for n in range(209)}
    weights |= {"cls_token": torch.ones(1, 1, 64), "pos_embed": torch.ones(1, 17, 64)}
    path = save(weights, tmp_path / "weights.pth")
    out = tmp_path / "out.safetensors"
    assert main(["import_weights", str(path), str(out)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "uses only 2 of 211 weights, 1% where 95% are needed" in said
    assert "not used: backbone.layer0.conv.weight, backbone.layer1.conv.weight" in said
    assert "and 197 more" in said
    assert "Name another with --scheme: 3things, timm_parallel, beit" in said
    assert not out.exists()


def test_a_missing_block_and_a_missing_weight_are_errors(tmp_path) -> None:
    weights = beit_pretraining(depth=4).weights
    without = {n: w for n, w in weights.items() if not n.startswith("blocks.1.")}
    refused(
        without, tmp_path, r"not filled: encoder\.blocks\.1\.attns\.0\.norm\.weight", heads=None
    )
    without = {n: w for n, w in weights.items() if n != "blocks.1.norm1.bias"}
    lacking = r"lacks encoder\.blocks\.1\.attns\.0\.norm\.bias of beit.*fetch it again"
    refused(without, tmp_path, lacking, heads=None)


def test_numbers_that_are_not_finite_are_named(tmp_path) -> None:
    weights = dict(beit_pretraining().weights)
    weights["blocks.1.mlp.fc1.weight"] = weights["blocks.1.mlp.fc1.weight"].clone()
    weights["blocks.1.mlp.fc1.weight"][0, 0] = float("nan")
    refused(weights, tmp_path, r"not finite in encoder\.blocks\.1\.ffns\.0\.mlp\.fc1\.weight")


@pytest.mark.parametrize("name", ["something.else", "blocks.0.attn.something"])
def test_an_unknown_weight_is_said(tmp_path, name) -> None:
    weights = {**beit_finetuned().weights, name: torch.ones(3)}
    coverage = import_weights(save(weights, tmp_path / "weights.pth")).coverage
    assert list(coverage.unused) == [name]
    assert 0.95 < coverage.share == coverage.of_theirs < 1


def test_a_bias_that_is_missing_in_one_block_is_not_taken_for_zero(tmp_path) -> None:
    weights = {n: w for n, w in beit_pretraining().weights.items() if n != "blocks.1.attn.q_bias"}
    refused(weights, tmp_path, r"lacks encoder\.blocks\.1\.attns\.0\.attn\.q_bias")


@pytest.mark.parametrize(
    "name",
    ["register_tokens", "reg_token", "dist_token", "blocks.0.mlp.w12.weight", "norm_pre.weight",
     "blocks.0.attn.q_norm.weight", "blocks.0.mlp.fc1_g.weight", "embeddings.distillation_token"],
)  # fmt: skip
def test_what_the_encoder_cannot_hold_is_refused_by_name(tmp_path, name) -> None:
    refused({**dinov2().weights, name: torch.ones(1)}, tmp_path, f"has '{name}', which an encoder")


def test_the_source_is_not_written_over(tmp_path, capsys) -> None:
    path = save(beit_pretraining().weights, tmp_path / "weights.safetensors")
    before = path.read_bytes()
    assert main(["import_weights", str(path), str(tmp_path / "." / path.name)]) == 2
    assert "is the file that is read" in " ".join(capsys.readouterr().err.split())
    assert path.read_bytes() == before


def test_every_refusal_says_why() -> None:
    assert all(len(why) > 10 for why in REFUSED.values())


def test_sizes_that_do_not_fit_are_refused_with_numbers(tmp_path) -> None:
    weights = dict(timm_vit().weights)
    none = {n: w for n, w in weights.items() if n != "cls_token"}
    refused(none, tmp_path, "has no class token")
    refused(weights, tmp_path, "a width of 64 has no standard one .*192: 3.* --heads", heads=None)
    refused(weights, tmp_path, "0 heads do not divide a width of 64", heads=0)
    refused(weights, tmp_path, "7 heads do not divide a width of 64", heads=7)
    oblong = {**weights, "pos_embed": torch.ones(1, 24, 64)}
    refused(oblong, tmp_path, "24 position embeddings, which is no square .* --image-size")
    said = "has 17 position embeddings, but a grid of 2x4 patches needs 8, or 9"
    refused(weights, tmp_path, said, image_size=(32, 64))
    refused({n: w for n, w in weights.items() if n != "pos_embed"}, tmp_path, "give --image-size")
    four = {**weights, "patch_embed.proj.weight": torch.ones(64, 4, 16, 16)}
    refused(four, tmp_path, r"shape \(64, 4, 16, 16\); mimkit takes square patches of three")
    narrow = {f"blocks.{n}.mlp.fc1.weight": torch.ones(128, 64) for n in range(3)}
    said = r"blocks\.0\.ffns\.0\.mlp\.fc1\.weight is \[128, 64\], expected \[256, 64\]"
    refused({**weights, **narrow}, tmp_path, said)


def test_two_kinds_of_positions_and_other_heads_than_the_bias_has_are_refused(tmp_path) -> None:
    weights = beit_finetuned().weights
    refused({**weights, "pos_embed": torch.ones(1, 17, 64)}, tmp_path, "both position embeddings")
    refused(dict(weights), tmp_path, "8 heads were asked for .* bias is for 4", heads=8)


def test_a_wrong_scheme_and_half_of_the_pixels_are_refused(tmp_path) -> None:
    weights = dict(timm_vit().weights)
    refused(weights, tmp_path, "no scheme 'beit2'. Did you mean 'beit'", scheme="beit2")
    refused(weights, tmp_path, "mean and std of the pixels belong together", mean=(0.5, 0.5, 0.5))
    said = r"no weight under a name of hf_vit .*, as in timm: leave --scheme out"
    refused(weights, tmp_path, said, scheme="hf_vit")


def test_two_encoders_in_one_file_are_refused(tmp_path) -> None:
    weights = timm_vit().weights
    both = {f"{who}.{n}": w.clone() for who in ("student", "teacher") for n, w in weights.items()}
    refused(both, tmp_path, r"holds 2 encoders, under 'student\.', 'teacher\.'")


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("layout", ["zip", "older", "bare"])
@pytest.mark.parametrize("place", ["model", "args"])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, layout, place) -> None:
    ran, path = tmp_path / "ran", tmp_path / "weights.pth"
    content = {"model": dict(timm_vit().weights), "args": None}
    content[place] = _Evil(ran)
    if layout == "bare":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=layout == "zip")
    with pytest.raises(UserError, match="was not read, and nothing in it was executed") as error:
        import_weights(path, heads=4)
    assert layout == "bare" or "mkdir" in str(error.value)
    assert not ran.exists()
    pickle.loads(pickle.dumps(_Evil(ran)))
    assert ran.exists()  # it would have


def test_damaged_files_are_refused(tmp_path) -> None:
    whole = save(timm_vit().weights, tmp_path / "whole.pth").read_bytes()
    path = tmp_path / "weights.pth"
    for content, said in (
        (whole[: len(whole) // 2], r"is not complete: it has [\d,]+ bytes, its weights alone are"),
        (whole[:-9], "its end is missing"),
        (whole[:300], "it has 300 bytes, and the table of contents at its end is missing"),
        (whole[:20], "is not complete: it has 20 bytes; fetch it again"),
        (b"<html>404 Not Found</html>", r"begins with b'<html>404 Not Fo'.* error page"),
        (b"", "neither safetensors"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=said):
            import_weights(path, heads=4)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no weights")
    with pytest.raises(UserError, match=r"a zip with 0 data\.pkl"):
        import_weights(path)
    with pytest.raises(UserError, match="there is no file"):
        import_weights(tmp_path / "none.pth")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is no JSON"):
        import_weights(save(timm_vit().weights, tmp_path / "model.safetensors"))
    refused({"epoch": 3, "args": None}, tmp_path, "holds no tensors; its names are epoch, args")


@pytest.mark.parametrize("reader", [import_weights, mimkit.load_encoder])
def test_safetensors_that_are_cut_short_say_how_much_is_there(tmp_path, reader) -> None:
    whole = save(timm_vit().weights, tmp_path / "whole.safetensors").read_bytes()
    path, size = tmp_path / "weights.safetensors", f"{len(whole):,}"
    for length in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=f"it has {length:,} of {size} bytes, so its end is"):
            reader(path)
    path.write_bytes(whole[:100])
    with pytest.raises(UserError, match=r"ends within its header: it has 100 bytes, the header"):
        reader(path)


def test_names_of_which_none_is_known_name_no_nearest_scheme(tmp_path) -> None:
    weights = {f"layer{n}.conv.weight": torch.ones(1) for n in range(9)}
    said = r"no weight under a name that mimkit knows; its 9 names are layer0\.conv\.weight, .*beit"
    refused(weights, tmp_path, said)


def test_files_of_mimkit_itself_and_of_a_newer_one_are_named(tmp_path) -> None:
    path = tmp_path / "encoder.safetensors"
    weights = {n: w.clone() for n, w in timm_vit().weights.items()}
    own = {"mimkit_format": "mimkit.encoder.1", "mimkit_version": mimkit.__version__}
    save_file(weights, path, metadata=own)
    with pytest.raises(UserError, match=r'own already: mimkit\.load_encoder\("encoder'):
        import_weights(path)
    save_file(weights, path, metadata={**own, "mimkit_version": "9.1.0"})
    with pytest.raises(UserError, match=r"written by mimkit 9\.1\.0, this is mimkit 0\.1\.0"):
        import_weights(path)
