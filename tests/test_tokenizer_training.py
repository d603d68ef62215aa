"""What the training of a dVAE reports is what its file does to held-out images."""

import json
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from commands import ROOT, Shards
from PIL import Image

from mimkit import build, tokenizer_training
from mimkit.audit.tokenizer import reconstruction
from mimkit.config import load_tokenizer_config
from mimkit.data.loader import eval_loader
from mimkit.tokenizers import TOKENIZERS
from mimkit.tokenizers._dvae_health import token_counts, token_health


def test_the_card_has_the_numbers_that_the_file_gives(
    tiny: list[str], shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ("data.train", "data.heldout", "data.cache_dir", "data.token_size", "engine.", "output.")
    config = load_tokenizer_config(ROOT / "configs" / "tokenizer.yaml", [
        *(word for word in tiny if word.startswith(kept)), f"output.dir={tmp_path / 'run'}",
        "train.steps=4", "train.batch_size=8", "model.width=16", "model.vocabulary=32",
    ])  # fmt: skip
    with mock.patch("torch.cuda.is_available", return_value=False):
        tokenizer_training.run(config, started_at=time.time())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())

    tokenizer = TOKENIZERS["dvae"](path=str(tmp_path / "run" / "tokenizer.safetensors"))
    source = build.build_source(config.data, str(shards.heldout), split="heldout")
    batches = list(eval_loader(source=source, view=build.build_probe_view(config.data), mask=None,
                               seed=0, batch_size=8, rank=0, world=1, workers=0))  # fmt: skip
    found = reconstruction(tokenizer, batches)
    assert found is not None
    # the file is in fp16, so some words at a tie are others
    assert summary["heldout_mae"] == pytest.approx(found.mae, rel=0.02)
    assert summary["heldout_psnr"] == pytest.approx(found.psnr, rel=0.02)
    assert summary["heldout_ssim"] == pytest.approx(found.ssim, abs=0.02)
    target = torch.cat([tokenizer.encode(batch.token_view_BChw.float() / 255) for batch in batches])
    entropy = token_health(token_counts(target, vocabulary=32)).entropy
    assert summary["unigram_entropy"] == pytest.approx(entropy, abs=0.05)

    card = (tmp_path / "run" / "tokenizer.md").read_text()
    assert f"| {summary['heldout_mae']:.4f} (DALL-E's: 0.0856, " in card
    assert f"| SSIM | {summary['heldout_ssim']:.4f} |" in card
    assert f"SSIM {summary['heldout_ssim']:.3f}." in capsys.readouterr().out
    with Image.open(tmp_path / "run" / "pictures" / "step-00000004.png") as picture:
        assert picture.size == (2 * (128 + 4), 14 + 8 * (128 + 4))
