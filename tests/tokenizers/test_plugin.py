"""A user's own tokenizer, in a file outside the package: somebody else's VQ-VAE, in 20 lines."""

import json
import tarfile
from itertools import islice
from pathlib import Path

import pytest
import torch
from commands import ROOT, pretrain
from test_contract import (  # the contract's tests, run again on the tokenizer of this file
    test_a_size_that_does_not_fit_is_refused,  # noqa: F401
    test_nothing_is_trained,  # noqa: F401
    test_one_target_a_patch_on_a_grid_that_is_not_square,  # noqa: F401
    test_targets_do_not_depend_on_mode_neighbours_or_earlier_calls,  # noqa: F401
    test_the_fingerprint_is_stable,  # noqa: F401
    test_the_right_answer_has_the_smaller_loss,  # noqa: F401
)
from torch import Tensor
from torch.nn.functional import interpolate

from mimkit import encoder_io
from mimkit.build import make_part
from mimkit.cli import main
from mimkit.config import PartConfig
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer

WEIGHTS = ROOT.parent / "shared" / "data" / "weights" / "swasun_vqvae_cifar10_model_ema.pth"

CIFAR = ROOT.parent / "shared" / "data" / "cifar10" / "test-00000.tar.gz"

pytestmark = pytest.mark.skipif(not WEIGHTS.exists(), reason="the shared weights are not here")

VQVAE = """\
from pathlib import Path
import torch
from torch.nn.functional import conv2d
from mimkit.files import sha256
from mimkit.tokenizers import VisualTokenizer

class VqVae(VisualTokenizer):
    patch, prediction_dim, vocabulary = 4, 512, 512

    def __init__(self, *, path: Path) -> None:
        super().__init__()
        self.fingerprint = sha256(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
        self.weights = torch.nn.ParameterList(weights.values()).requires_grad_(False)

    def encode(self, view_BChw):
        w1, b1, w2, b2, w3, b3, r1, r2, r3, r4, wq, bq, _, _, codes, *_ = self.weights
        x = conv2d(view_BChw * 2 - 1, w1, b1, stride=2, padding=1).relu()
        x = conv2d(conv2d(x, w2, b2, stride=2, padding=1).relu(), w3, b3, padding=1).relu()
        for first, second in ((r1, r2), (r3, r4)):
            x = (x + conv2d(conv2d(x, first, padding=1).relu(), second)).relu()
        return torch.cdist(conv2d(x, wq, bq).flatten(2).mT, codes).argmin(-1)
"""

DECODER = """
from torch.nn.functional import conv_transpose2d

class DrawingVqVae(VqVae):
    def decode(self, target_BN, grid):
        codes, w1, b1, r1, r2, r3, r4, w2, b2, w3, b3 = self.weights[14:]
        x = conv2d(codes[target_BN].mT.unflatten(2, grid), w1, b1, padding=1).relu()
        for first, second in ((r1, r2), (r3, r4)):
            x = (x + conv2d(conv2d(x, first, padding=1).relu(), second)).relu()
        x = conv_transpose2d(x, w2, b2, stride=2, padding=1).relu()
        return (conv_transpose2d(x, w3, b3, stride=2, padding=1) * 0.5 + 0.5).clamp(0, 1)
"""


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the user writes behind `tokenizer=`."""
    path = tmp_path_factory.mktemp("users") / "vqvae.py"
    path.write_text(VQVAE)
    return f"{path}:VqVae"


@pytest.fixture
def tokenizer(part: str) -> VisualTokenizer:
    return make_part(TOKENIZERS, PartConfig(name=part, path=str(WEIGHTS)))


def test_the_users_file_has_fewer_than_twenty_lines() -> None:
    assert len([line for line in VQVAE.splitlines() if line.strip()]) < 20


def test_its_tokens_carry_the_picture(
    photos: Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoded, they give photographs back; a wrong net would not (random tokens: 10 dB).

    Its 24.8 dB on the test images of CIFAR-10 come out of the audit.
    """
    file, shard = tmp_path / "vqvae.py", tmp_path / "test.tar"
    file.write_text(VQVAE + DECODER)
    name = f"{file}:DrawingVqVae"
    tokenizer = make_part(TOKENIZERS, PartConfig(name=name, path=str(WEIGHTS)))
    view_BChw = interpolate(photos, 32, mode="area")
    token_BN = tokenizer.encode(view_BChw)
    assert len(token_BN.unique()) > 100
    error = (tokenizer.decode(token_BN, (8, 8)) - view_BChw).square().mean()
    assert float(-10 * error.log10()) > 22
    if not CIFAR.exists():
        pytest.skip("CIFAR-10 is not here")
    with tarfile.open(CIFAR) as packed, tarfile.open(shard, "w") as plain:
        for member in islice(packed, 1000):  # 500 images
            plain.addfile(member, packed.extractfile(member))
    words = ["--tokenizer", f"{name}:path={WEIGHTS}", "--shards", str(shard),
             "--size", "32", "--images", "16"]  # fmt: skip
    json_file = tmp_path / "health.json"
    assert main(["audit", "tokenizer", *words, "--redraw-at", "32", "--json", str(json_file)]) == 0
    found = json.loads(json_file.read_text())
    assert found["reconstruction"]["psnr"] == pytest.approx(24.8, abs=0.2)
    assert "redrawn: whole images of 32 pixels, as 32 x 32" in capsys.readouterr().out


def test_it_pretrains_like_one_of_ours_and_the_run_can_be_rebuilt(
    part: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 x 8 patches of 4 pixels; the same command finds the run again, `load_run` its encoder."""
    words = [word for word in tiny if not word.startswith("tokenizer.")]
    words += [f"tokenizer={part}", f"tokenizer.path={WEIGHTS}", "encoder.patch_size=4",
              "mask.num_masked=24", f"output.dir={tmp_path / 'run'}"]  # fmt: skip
    assert pretrain(words) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.3
    config, encoder, _ = encoder_io.load_run(tmp_path / "run")
    assert config.tokenizer.name == part
    assert encoder(torch.zeros(1, 3, 32, 32)).shape == (1, 65, 192)
    capsys.readouterr()
    assert pretrain(words) == 0
    assert "is finished already" in capsys.readouterr().out
