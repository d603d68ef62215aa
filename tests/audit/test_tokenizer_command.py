"""`tools/audit.py tokenizer` as a user gives it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ROOT, Shards, command
from PIL import Image
from torch.nn.functional import interpolate

from mimkit import build
from mimkit.cli import main
from mimkit.config import DataConfig
from mimkit.tokenizers import TOKENIZERS
from mimkit.tokenizers._dvae_file import save_dvae

HEAVY = {"torch", "numpy", "torchmetrics", "matplotlib", "timm", "PIL"}


def audit(*words: str | Path) -> int:
    return main(["audit", "tokenizer", *map(str, words)])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _away_from_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedded photographs and indexes are cached below it."""
    monkeypatch.setenv("HOME", str(home))


@pytest.fixture(scope="module")
def constant_file(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dVAE with one word that always wins."""
    dvae = TOKENIZERS["dvae"](path=str(tokenizer_file)).dvae
    with torch.no_grad():
        dvae.encoder.blocks.output.conv.b[3] += 1e4
    path = tmp_path_factory.mktemp("constant") / "constant.safetensors"
    save_dvae(path, dvae, settings={}, half=True)
    return path


def test_verdict_table_numbers_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the embedded tokenizer on embedded photographs, by default."""
    assert audit("--images", "20", "--json", tmp_path / "new" / "health.json", "--picture",
                 tmp_path / "pictures") == 0  # fmt: skip
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "new" / "health.json").read_text())
    assert out.startswith("dvae:path=embedded: healthy\n")
    assert "20 training views of 64 pixels, of the embedded held-out photographs" in out
    assert (found["verdict"], found["images"], found["grid"]) == ("healthy", 20, [8, 8])
    words, drawn = found["words"], found["reconstruction"]
    assert 150 < words["codes_used"] < 512 and 4.5 < words["entropy"] < 6
    assert 0.04 < drawn["mae"] < 0.09 and 17 < drawn["psnr"] < 24 and 0.3 < drawn["ssim"] < 0.8
    assert found["same_crop"]["table"][1][1] == found["same_crop"]["right"] > 0.7
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert f"{words['codes_used']} of 512" in lines["words used"]
    assert f"{words['entropy']:.3f}" in lines["unigram entropy, nats"]
    assert f"{found['stable_shift']:.1%}" in lines["target stays, moved by 1 pixel"]
    assert f"{found['same_crop']['right']:.1%}" in lines["encoder's view: same patch"]
    assert f"{found['moved_crop']['right']:.1%}" in lines["that moved 1 patch: patch to the right"]
    assert f"{drawn['mae']:.4f}" in lines["redrawn: pixel MAE, 0..1"]
    assert "0.0856" in lines["redrawn: pixel MAE, 0..1"]
    assert max(map(len, out.splitlines()[2:-4])) <= 120
    pictures = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert pictures == ["tokenizer-dvae-path=embedded.png", "words-dvae-path=embedded.png"]
    with Image.open(tmp_path / "pictures" / pictures[0]) as picture:
        assert picture.size == (3 * 132, 14 + 8 * 132)
    with Image.open(tmp_path / "pictures" / pictures[1]) as picture:
        assert (np.asarray(picture.convert("L")) < 200).mean() > 0.02


def test_a_constant_tokenizer_is_dead(
    constant_file: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tokenizer", f"dvae:path={constant_file}", "--shards", shards.train, "--size", "32"]
    assert audit(*words, "--images", "18", "--json", tmp_path / "dead.json") == 1
    out = capsys.readouterr().out
    assert out.startswith(f"dvae:path={constant_file}: dead: one word takes 100.0% of 288 patches")
    assert f"18 training views of 32 pixels, of {shards.train}" in out
    found = json.loads((tmp_path / "dead.json").read_text())
    assert (found["verdict"], found["words"]["codes_used"]) == ("dead", 1)
    assert found["words"]["entropy"] == 0


def test_whole_images_are_redrawn_at_another_size(
    tokenizer_file: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 pixels as 32 x 32: by hand, from the same files."""
    json_file = tmp_path / "health.json"
    words = ["--tokenizer", f"dvae:path={tokenizer_file}", "--shards", shards.heldout]
    audit(*words, "--size", "32", "--images", "4", "--redraw-at", "16", "--json", json_file)
    assert "redrawn: whole images of 16 pixels, as 32 x 32" in capsys.readouterr().out
    data = DataConfig(token_size=16)
    view = build.build_probe_view(data, "tokens")
    source = build.build_source(data, str(shards.heldout), split="heldout")
    image_BChw = torch.stack([view(sample.image).token_view_Chw for sample in source]) / 255
    large_BChw = interpolate(image_BChw, 32, mode="bicubic", antialias=True).clamp(0, 1)
    tokenizer = TOKENIZERS["dvae"](path=str(tokenizer_file))
    again_BChw = tokenizer.decode(tokenizer.encode(large_BChw), (4, 4))
    again_BChw = interpolate(again_BChw, 16, mode="bicubic", antialias=True).clamp(0, 1)
    found = json.loads(json_file.read_text())["reconstruction"]
    error = (again_BChw - image_BChw).square().mean()
    assert found["psnr"] == pytest.approx(float(-10 * error.log10()), abs=1e-3)
    assert found["mae"] == pytest.approx(float((again_BChw - image_BChw).abs().mean()), abs=1e-5)


def test_targets_that_are_numbers(shards: Shards, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("--tokenizer", "pixels:patch=8", "--shards", shards.train, "--size", "32",
                 "--images", "9") == 0  # fmt: skip
    out = capsys.readouterr().out
    assert out.startswith("pixels:patch=8: healthy\n")
    assert "spread of the numbers" in out
    assert "words used" not in out and "MAE" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokenizer", "dvea"], "no tokenizer called 'dvea'. Did you mean 'dvae'?"),
        (["--tokenizer", "dvae"], "tokenizer 'dvae' needs tokenizer.path"),
        (["--tokenizer", "dvae:path=nowhere.safetensors"], "nowhere.safetensors"),
        (["--tokenizer", "dvae:path"], "'path' in 'dvae:path' is no setting; write NAME"),
        (["--images", "0"], "--images is 0; set it to 1 or more"),
        (["--seed", "-1"], "--seed is -1; set it to 0 or more"),
        (["--size", "7"], "--size is 7; set it to 8 or more"),
        (["--size", "60"], "--size 60 (a run's data.token_size): tokenizer 'dvae' makes"),
        (["--size", "16"], "--size 16 makes 2 x 2 patches; the audit compares each with its "
         "neighbours and needs 3 x 3 at least: set --size to 24 or more"),
        (["--redraw-at", "7"], "--redraw-at is 7; set it to 8 or more"),
        (["--tokenizer", "pixels:patch=8", "--redraw-at", "32"],
         "pixels:patch=8 redraws none; leave it out"),
        (["--shards", "no/such-*.tar"], "looked for such-*.tar in no"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(*words, "--json", tmp_path / "health.json") == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_help_does_not_wait_for_torch() -> None:
    code = ("import sys; from mimkit.cli import main\n"
            "try:\n  main(['audit', 'tokenizer', '--help'])\n"
            "except SystemExit: print('LOADED', *sys.modules)")  # fmt: skip
    ended = command(["-c", code], cwd=ROOT)
    text, _, loaded = ended.out.partition("LOADED")
    assert "--tokenizer dalle:path=dalle.safetensors,decoder=decoder.pkl" in text
    assert "mimkit.cli._audit.tokenizer" in loaded.split()
    assert HEAVY.isdisjoint(loaded.split())
