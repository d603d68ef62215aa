"""A user's own tokenizer, in a file outside the package: somebody else's VQ-VAE, in 20 lines."""

import json
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
from torch.nn.functional import conv2d, conv_transpose2d, interpolate

from mimkit import encoder_io
from mimkit.build import make_part
from mimkit.config import PartConfig
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer

WEIGHTS = ROOT.parent / "shared" / "data" / "weights" / "swasun_vqvae_cifar10_model_ema.pth"

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


def _redrawn(token_BN: Tensor, *, rows: int) -> Tensor:
    """The VQ-VAE's own decoder, written out here: token_BN -> image_BChw in [0, 1]."""
    w = torch.load(WEIGHTS, map_location="cpu", weights_only=True)
    code_BNV = w["_vq_vae._embedding.weight"][token_BN]
    x = code_BNV.mT.unflatten(2, (rows, -1))
    x = conv2d(x, w["_decoder._conv_1.weight"], w["_decoder._conv_1.bias"], padding=1).relu()
    for layer in ("0", "1"):
        block = f"_decoder._residual_stack._layers.{layer}._block."
        hidden = conv2d(x, w[block + "1.weight"], padding=1).relu()
        x = (x + conv2d(hidden, w[block + "3.weight"])).relu()
    for name, act in (("_decoder._conv_trans_1", torch.relu), ("_decoder._conv_trans_2", None)):
        x = conv_transpose2d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride=2, padding=1)
        x = act(x) if act else x
    return (x * 0.5 + 0.5).clamp(0, 1)


def test_its_tokens_carry_the_picture(tokenizer: VisualTokenizer, photos: Tensor) -> None:
    """Decoded, they give photographs back; a wrong net would not (random tokens: 10 dB)."""
    view_BChw = interpolate(photos, 32, mode="area")
    token_BN = tokenizer.encode(view_BChw)
    assert len(token_BN.unique()) > 100
    error = (_redrawn(token_BN, rows=8) - view_BChw).square().mean()
    assert float(-10 * error.log10()) > 22


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
