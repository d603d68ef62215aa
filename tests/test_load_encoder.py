"""`mimkit.load_encoder`: runs, checkpoints and files become plain modules; pickles never run."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from commands import ROOT, command
from huggingface_hub import PyTorchModelHubMixin
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer

import mimkit
from mimkit.batch import normalise
from mimkit.cli import main
from mimkit.encoder_io import load_encoder, load_run
from mimkit.errors import UserError
from mimkit.export._pretrained import Normalisation, PretrainedEncoder, save_encoder
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.resize import resized
from mimkit.models.stems import STEMS


@pytest.fixture(scope="module")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "encoder.safetensors"
    assert main(["export", str(finished_run), "--format", "safetensors", str(out)]) == 0
    return out


def pixels(height: int = 32, width: int = 32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, 3, height, width), generator=draw, dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["run", "checkpoint", "file", "folder"])
def test_every_kind_of_path_gives_the_same_encoder(
    kind: str, finished_run: Path, exported: Path, tmp_path: Path
) -> None:
    shutil.copy(exported, tmp_path / "model.safetensors")
    path = {"run": finished_run, "file": exported, "folder": tmp_path,
            "checkpoint": finished_run / "checkpoints" / "step-00000006"}[kind]  # fmt: skip
    config, expected, _ = load_run(finished_run)
    encoder = mimkit.load_encoder(str(path))
    assert not any(module.training for module in encoder.modules())
    images = encoder.normalisation(pixels())
    assert torch.equal(images, normalise(pixels(), mean=config.data.mean, std=config.data.std))
    with torch.no_grad():
        tokens_BND = encoder.forward_features(images)
        assert torch.equal(tokens_BND, expected(images))
        assert torch.equal(encoder(images), tokens_BND[:, 1:].mean(1))
        assert torch.equal(
            encoder.intermediates(images, [1])[0], expected.intermediates(images, [1])[0]
        )
    assert (encoder.grid(64, 32), encoder.image_size) == ((8, 4), (32, 32))
    assert set(json.loads(encoder.about["metrics"])) >= {"heldout_loss", "knn_top1"}
    tokenizer = json.loads((finished_run / "run.json").read_text())["facts"]["tokenizer"]
    assert encoder.about["tokenizer"] == tokenizer


def test_normalisation_takes_bytes_and_floats() -> None:
    rule = Normalisation((0.4, 0.5, 0.6), (0.2, 0.25, 0.5))
    torch.testing.assert_close(rule(pixels()), rule(pixels() / 255), rtol=0, atol=1e-5)
    white = rule(torch.ones(1, 3, 1, 1)).flatten()
    torch.testing.assert_close(white, torch.tensor([3.0, 2.0, 0.8]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", ["absolute", "relative", "relative_shared", "none"])
@pytest.mark.parametrize("size", [(32, 32), (48, 16), (40, 64)])
def test_any_multiple_of_the_patch_is_taken(tmp_path: Path, positions: str, size) -> None:
    source = _small(positions)
    save_encoder(tmp_path / "a", source, normalisation=_HALF, about={})
    images = _HALF(pixels(*size))
    encoder = load_encoder(tmp_path / "a")
    fixed = load_encoder(tmp_path / "a", image_size=size)
    grid = (size[0] // 8, size[1] // 8)
    assert fixed.image_size == size
    assert fixed.encoder.grid == grid
    with torch.no_grad():
        expected = resized(source, grid)(images)
        assert torch.equal(encoder.forward_features(images), expected)
        assert torch.equal(fixed.forward_features(images), expected)
    said = r"are of 33x32 pixels, which do not divide into patches of 8.*32x32"
    with pytest.raises(UserError, match=said):
        encoder(torch.zeros(1, 3, 33, 32))


_HALF = Normalisation((0.5,) * 3, (0.5,) * 3)


def _small(positions: str = "absolute") -> ImageEncoder:
    encoder = Encoder(width=32, heads=4, depth=2, grid=(4, 4), positions=positions)
    model = ImageEncoder(STEMS["hmlp"](width=32, patch_size=8), encoder)
    initialise(model, seed=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "relative" in name:
                weight.normal_(generator=torch.Generator().manual_seed(3))
    return model.eval()


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (torch.zeros(3, 32, 32), r"shape \(3, 32, 32\), expected \(B, 3, .*images\[None\]"),
        (torch.zeros(1, 32, 32, 3), r"channels are last: images\.permute\(0, 3, 1, 2\)"),
        (torch.zeros(1, 1, 32, 32), r"1 channels where 3 are expected.*grey"),
        (torch.zeros(1, 4, 32, 32), r"4 channels where 3 are expected.*alpha"),
        (torch.zeros(2, 2), r"the shape \(2, 2\), expected"),
        (torch.zeros(0, 3, 32, 32), r"shape \(0, 3, 32, 32\), which is none"),
        (torch.zeros(1, 3, 32, 0), r"shape \(1, 3, 32, 0\), which is none"),
        (torch.zeros(1, 3, 4, 32), r"4x32 pixels, which do not divide into patches of 8.*8x32"),
        (pixels(), r"torch\.uint8, expected normalised ones.*encoder\.normalisation"),
        (torch.zeros(1, 3, 32, 32).double(), r"float64 and the encoder's weights torch\.float32"),
        ([[0.0]], r"images are a list, expected a tensor"),
    ],
)
def test_images_that_are_none_are_refused_as_a_person_would(images, said: str) -> None:
    encoder = PretrainedEncoder(_small(), normalisation=_HALF, about={})
    for call in (encoder, encoder.forward_features, lambda x: encoder.intermediates(x, [1])):
        with pytest.raises(ValueError, match=said):
            call(images)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (pixels().float(), r"from 0 to 255, and floats .* in \[0, 1\]; divide them by 255"),
        (torch.full((3, 8, 8), -2.1), r"from -2\.1 to -2\.1.*are they normalised already"),
        (torch.full((1, 3, 8, 8), float("nan")), "hold NaN"),
        (pixels().long(), r"torch\.int64, expected uint8"),
        (torch.zeros(8, 8, 3), r"images\.permute\(2, 0, 1\)"),
        (torch.zeros(8, 8), r"the shape \(8, 8\)"),
    ],
)
def test_pixels_that_are_none_are_refused(images, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _HALF(images)


def test_one_image_and_what_bicubic_resizing_overshoots_are_normalised() -> None:
    image = torch.tensor([-0.1, 0.5, 1.1])[:, None, None].expand(3, 8, 8)
    expected = torch.tensor([-1.2, 0.0, 1.2])
    torch.testing.assert_close(_HALF(image)[:, 0, 0], expected, rtol=0, atol=1e-5)


def test_autocast_takes_images_of_another_type() -> None:
    encoder = PretrainedEncoder(_small(), normalisation=_HALF, about={})
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert encoder(torch.zeros(1, 3, 32, 32).bfloat16()).shape == (1, 32)


def test_sizes_are_spoken_of_by_the_callers_own_words(exported: Path) -> None:
    with pytest.raises(UserError, match=r"image_size is 33x33 pixels, which do not divide"):
        load_encoder(exported, image_size=33)
    with pytest.raises(UserError, match=r"an image is of 33x32 pixels.*32x32"):
        load_encoder(exported).grid(33, 32)


def test_a_cast_or_moved_encoder_works_at_other_sizes_too() -> None:
    encoder = PretrainedEncoder(_small("relative"), normalisation=_HALF, about={}).bfloat16()
    assert encoder(torch.zeros(1, 3, 40, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_three_lines_in_a_fresh_process(exported: Path) -> None:
    code = f"""
import torch
import mimkit
encoder = mimkit.load_encoder({str(exported)!r})
images = torch.randint(256, (2, 3, 64, 48), dtype=torch.uint8)
features = encoder(encoder.normalisation(images))
print(tuple(features.shape), type(encoder).__mro__[1].__module__)
"""
    ended = command(["-c", code], cwd=ROOT)
    assert ended.out.strip() == "(2, 192) torch.nn.modules.module", ended.err


def test_torch_hub_gives_the_same(exported: Path) -> None:
    encoder = torch.hub.load(str(ROOT), "encoder", str(exported), source="local")
    with torch.no_grad():
        images = encoder.normalisation(pixels())
        assert torch.equal(encoder(images), load_encoder(exported)(images))


def test_the_hubs_mixin_saves_and_loads(tmp_path: Path, exported: Path) -> None:
    encoder = load_encoder(exported)
    assert isinstance(encoder, PyTorchModelHubMixin)
    encoder.save_pretrained(tmp_path / "saved")
    again = PretrainedEncoder.from_pretrained(tmp_path / "saved")
    assert not again.training
    assert again.normalisation == encoder.normalisation
    with torch.no_grad():
        images = encoder.normalisation(pixels())
        assert torch.equal(again(images), encoder(images))
        assert torch.equal(load_encoder(tmp_path / "saved")(images), encoder(images))
    assert "library_name: mimkit" in (tmp_path / "saved" / "README.md").read_text()


class _Hostile:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("form", ["pickle", "torch", "pt2", "folder"])
def test_hostile_pickles_are_refused_and_never_run(form: str, tmp_path: Path) -> None:
    witness, path = tmp_path / "witness", tmp_path / f"model.{form}"
    if form == "pickle":
        path.write_bytes(pickle.dumps(_Hostile(witness)))
    elif form == "pt2":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data/weights/weight_0", pickle.dumps(_Hostile(witness)))
    elif form == "torch":
        torch.save({"model": _Hostile(witness)}, path)
    else:
        path.mkdir()
        (path / "model.safetensors").write_bytes(pickle.dumps(_Hostile(witness)))
    with pytest.raises(UserError, match=r"is a pickle or an archive of pickles.*safetensors only"):
        load_encoder(path)
    assert not witness.exists()
    if form == "pickle":  # the fixture does what it says
        pickle.loads(path.read_bytes())
        assert witness.exists()


def test_a_file_of_a_newer_mimkit_is_refused_by_name(exported: Path, tmp_path: Path) -> None:
    with safe_open(exported, framework="pt") as file:
        said = file.metadata()
    newer = {**said, "mimkit_format": "mimkit.encoder.2", "mimkit_version": "7.1.0"}
    save_file(load_file(exported), tmp_path / "a", newer)
    with pytest.raises(UserError, match=r"by mimkit 7\.1\.0 in the format mimkit\.encoder\.2"):
        load_encoder(tmp_path / "a")


def test_a_run_of_a_newer_mimkit_is_refused_by_name(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run, symlinks=True)
    said = json.loads((run / "run.json").read_text())
    for version, newer in (("0.1.0", False), ("0.0.9", False), ("0.10.0", True), ("1.0", True)):
        (run / "run.json").write_text(json.dumps({**said, "mimkit": version}))
        if newer:
            with pytest.raises(
                UserError, match=rf"was written by mimkit {version}, this is mimkit"
            ):
                load_encoder(run)
        else:
            assert load_encoder(run).image_size == (32, 32)


@pytest.mark.parametrize("kind", ["missing", "foreign", "renamed", "empty"])
def test_what_is_no_encoder_is_refused(kind: str, tmp_path: Path, exported: Path) -> None:
    path = tmp_path / kind
    if kind == "foreign":
        save_file({"a": torch.zeros(1)}, path)
    if kind == "renamed":
        weights = load_file(exported)
        weights["encoder.other"] = weights.pop("encoder.cls_token")
        with safe_open(exported, framework="pt") as file:
            save_file(weights, path, file.metadata())
    if kind == "empty":
        path.mkdir()
    message = {
        "missing": "there is no ",
        "foreign": "has no weight under a name that mimkit knows",
        "renamed": r"unused \['encoder\.other'\], unfilled \['encoder\.cls_token'\]",
        "empty": "is no run folder",
    }[kind]
    with pytest.raises(UserError, match=message):
        load_encoder(path)


def test_mimkit_has_no_other_lazy_names() -> None:
    with pytest.raises(AttributeError, match="module 'mimkit' has no attribute 'load_encoders'"):
        mimkit.load_encoders  # noqa: B018


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_of_somebody_else_is_imported_and_says_so(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3}
    theirs = VisionTransformer(**sizes, num_classes=0).eval()
    path = tmp_path / f"vit{suffix}"
    if suffix == ".pth":
        torch.save(theirs.state_dict(), path)
    else:
        save_file(theirs.state_dict(), path)
    encoder = mimkit.load_encoder(path)
    assert "names of 'timm', 100.0 % of the weights used" in caplog.text
    images = encoder.normalisation(pixels())
    with torch.no_grad():
        expected_BND = theirs.forward_features(images)
        torch.testing.assert_close(
            encoder.forward_features(images), expected_BND, rtol=0, atol=1e-5
        )
