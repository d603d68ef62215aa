"""Features of a frozen teacher: equal to timm's own, from every kind of file, or refused."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from teachers import export_encoder
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.export.timm import load
from mimkit.tokenizers import TOKENIZERS

features = TOKENIZERS["features"]
SMALL = "test_vit"  # timm's for tests: width 64, patches of 16 pixels, images of 160


@pytest.fixture
def views(photos: Tensor) -> Tensor:
    return photos[:3, :, :32, :32]


@pytest.fixture(scope="module")
def timm_model() -> nn.Module:
    torch.manual_seed(3)
    return timm.create_model(SMALL, pretrained=False, num_classes=10).eval()


@pytest.fixture(scope="module")
def timm_file(timm_model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("timm") / "vit.safetensors"
    save_file(timm_model.state_dict(), path)
    return path


@torch.no_grad()
def test_an_exported_encoder_gives_what_timm_makes_of_it(
    features_file: Path, views: Tensor
) -> None:
    with safe_open(features_file, framework="pt") as file:
        plain = VisionTransformer(**json.loads(file.metadata()["timm"])).eval()
    plain.load_state_dict(load_file(features_file))
    feature_BNV = plain.forward_features((views - 0.4) / 0.2)[:, 1:]
    raw = features(path=str(features_file), normalise="none").encode(views)
    torch.testing.assert_close(raw, feature_BNV, rtol=0, atol=1e-5)
    mean, variance = raw.mean(-1, keepdim=True), raw.var(-1, keepdim=True, unbiased=False)
    layer = features(path=str(features_file)).encode(views)
    torch.testing.assert_close(layer, (raw - mean) / (variance + 1e-5).sqrt(), rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        {"branches": 2},
        {"positions": "none"},
        {"positions": "relative"},
        {"layer_scale": None, "final_norm": False},
    ],
    ids=["branches", "no positions", "relative positions", "no scale, no norm"],
)
def test_every_kind_of_exported_encoder_is_a_teacher(
    tmp_path: Path, views: Tensor, settings: dict[str, object]
) -> None:
    path = export_encoder(tmp_path / "teacher.safetensors", **settings)
    expected = load(path).forward_features((views - 0.4) / 0.2)[:, 1:]
    got = features(path=str(path), normalise="none").encode(views)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_weights_of_timm_are_read_without_their_head(
    timm_model: nn.Module, timm_file: Path, photos: Tensor, tmp_path: Path
) -> None:
    view_BChw = nn.functional.interpolate(photos[:2], 160)
    expected = timm_model.forward_features((view_BChw - 0.5) / 0.5)[:, 1:]
    torch.save({"state_dict": timm_model.state_dict()}, tmp_path / "vit.pth")
    tokenizers = [
        features(path=str(path), architecture=SMALL, normalise="none")
        for path in (timm_file, tmp_path / "vit.pth")
    ]
    for tokenizer in tokenizers:
        assert tokenizer.grid(160, 160) == (10, 10)
        got = tokenizer.encode(view_BChw)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert tokenizers[0].fingerprint == tokenizers[1].fingerprint


def test_the_users_pixels_replace_those_of_the_file(features_file: Path, views: Tensor) -> None:
    theirs = features(path=str(features_file))
    ours = features(path=str(features_file), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    moved_BChw = (views - 0.5) / 0.25 * 0.2 + 0.4
    torch.testing.assert_close(ours.encode(views), theirs.encode(moved_BChw), rtol=0, atol=1e-4)
    assert ours.fingerprint != theirs.fingerprint


@pytest.mark.parametrize("loss", ["cosine", "smooth_l1", "mse"])
def test_losses_equal_their_formulas(features_file: Path, loss: str) -> None:
    draw = torch.Generator().manual_seed(0)
    predicted_MV, target_MV = torch.randn(2, 7, 32, generator=draw).unbind()
    difference = (predicted_MV - target_MV).abs()
    lengths = predicted_MV.norm(dim=1) * target_MV.norm(dim=1)
    expected = {
        "cosine": (1 - (predicted_MV * target_MV).sum(1) / lengths).mean(),
        "smooth_l1": torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean(),
        "mse": difference.square().mean(),
    }[loss]
    tokenizer = features(path=str(features_file), loss=loss)
    torch.testing.assert_close(tokenizer.loss(predicted_MV, target_MV), expected)


def test_autocast_around_it_changes_nothing(features_file: Path, views: Tensor) -> None:
    tokenizer = features(path=str(features_file))
    expected = tokenizer.encode(views)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tokenizer.encode(views), expected)


def test_a_random_teacher_is_always_the_same_and_moves_no_draw() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    fingerprints = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        fingerprints.append(features(path="random", architecture=SMALL).fingerprint)
    assert fingerprints[0] == fingerprints[1]
    torch.manual_seed(1)
    features(path="random", architecture=SMALL)
    assert torch.equal(torch.rand(3), expected)


def test_a_random_teacher_must_be_asked_for(timm_file: Path) -> None:
    with pytest.raises(UserError, match=r"which one, says tokenizer\.architecture"):
        features(path="random")
    with pytest.raises(UserError, match=r"set tokenizer\.architecture to timm's name"):
        features(path=str(timm_file))


def test_a_convolutional_teacher_has_maps_too(photos: Tensor) -> None:
    tokenizer = features(path="random", architecture="test_resnet")
    assert tokenizer.grid(64, 64) == (2, 2)
    assert tokenizer.encode(photos).shape == (len(photos), 4, tokenizer.prediction_dim)


def test_a_teacher_of_one_size_says_which() -> None:
    tokenizer = features(path="random", architecture="test_vit_relpos")
    assert tokenizer.grid(160, 160) == (10, 10)
    with pytest.raises(UserError, match=r"sees 160 x 160 pixels and no other.*token_size=160"):
        tokenizer.grid(32, 32)


def test_an_architecture_that_timm_has_not_is_answered_with_the_nearest(timm_file: Path) -> None:
    with pytest.raises(UserError, match=r"no such model\. Did you mean 'test_vit'"):
        features(path=str(timm_file), architecture="tset_vit")


def test_an_exported_file_and_an_architecture_contradict(features_file: Path) -> None:
    with pytest.raises(UserError, match=r"leave out tokenizer\.architecture=test_vit"):
        features(path=str(features_file), architecture=SMALL)


def test_another_stem_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = export_encoder(tmp_path / "teacher.safetensors", stem="hmlp")
    with pytest.raises(UserError, match=r"the stem 'hmlp'.*needs stem\.name=linear.*of your own"):
        features(path=str(path))


def test_weights_that_do_not_fit_are_listed(timm_file: Path, tmp_path: Path) -> None:
    weights = load_file(timm_file)
    weights["norm.bias"][0] = float("nan")
    weights["cls_token"] = torch.zeros(1, 1, 3)
    weights["more"] = weights.pop("norm.weight")
    save_file(weights, tmp_path / "broken.safetensors")
    with pytest.raises(UserError) as caught:
        features(path=str(tmp_path / "broken.safetensors"), architecture=SMALL)
    message = str(caught.value)
    for what in ("not used: more", "missing: norm.weight", "of another shape: cls_token",
                 "not finite: norm.bias", "save_model(timm.create_model"):  # fmt: skip
        assert what in message


class _Attack:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize("content", ["missing", "text", "cut", "pickle"])
def test_a_file_that_is_no_weights_is_refused_and_not_executed(
    content: str, timm_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("teacher.pth")
    if content == "text":
        path.write_text("<html>404</html>")
    elif content == "cut":
        path.write_bytes(timm_file.read_bytes()[:-100])
    elif content == "pickle":
        torch.save({"weight": _Attack()}, path)
    with pytest.raises(UserError, match=r"teacher.pth' (with|is no) ?.*`mimkit export RUN"):
        features(path=str(path), architecture=SMALL)
    assert not Path("executed").exists()
