"""What the training of a dVAE reports is what its file does to held-out images."""

import gc
import json
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
from commands import ROOT, Shards
from PIL import Image

from mimkit import build, tokenizer_training
from mimkit.audit.tokenizer import reconstruction
from mimkit.config import SourceConfig, load_config, load_tokenizer_config
from mimkit.data.loader import eval_loader
from mimkit.errors import UserError
from mimkit.ports import free_port
from mimkit.tokenizer_report import what_next
from mimkit.tokenizers import TOKENIZERS
from mimkit.tokenizers._dvae_health import token_counts, token_health
from mimkit.tokenizers._dvae_training import DvaeTrainee, revive_words
from mimkit.train import checkpoint


def _words(tiny: list[str], *more: str) -> list[str]:
    """Overrides of configs/tokenizer.yaml that make it a training of seconds."""
    kept = ("data.train", "data.heldout", "data.cache_dir", "data.token_size", "engine.", "output.")
    return [*(word for word in tiny if word.startswith(kept)), "train.batch_size=8",
            "model.width=16", "model.vocabulary=32", *more]  # fmt: skip


def _run(words: list[str]) -> None:
    config = load_tokenizer_config(ROOT / "configs" / "tokenizer.yaml", words)
    with mock.patch("torch.cuda.is_available", return_value=False):
        tokenizer_training.run(config, started_at=time.time())


def test_the_card_has_the_numbers_that_the_file_gives(
    tiny: list[str], shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _words(tiny, f"output.dir={tmp_path / 'run'}", "train.steps=4")
    config = load_tokenizer_config(ROOT / "configs" / "tokenizer.yaml", words)
    _run(words)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())

    tokenizer = TOKENIZERS["dvae"](path=str(tmp_path / "run" / "tokenizer.safetensors"))
    whole = TOKENIZERS["dvae"](path=str(tmp_path / "run"))  # the run folder does as well
    assert whole.fingerprint == tokenizer.fingerprint
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
    assert f"Fingerprint `{tokenizer.fingerprint}`:" in card
    assert f"SSIM {summary['heldout_ssim']:.3f}." in capsys.readouterr().out
    with Image.open(tmp_path / "run" / "pictures" / "step-00000004.png") as picture:
        assert picture.size == (2 * (128 + 4), 14 + 8 * (128 + 4))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_revival_is_exact_when_a_run_is_continued(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which words start again, and beside which, is a function of what a checkpoint has.

    The run that is cut leaves files open, which would warn.
    """
    revived = list[int]()
    alive = True

    def revive(*given: Any, **named: Any) -> int:
        if len(revived) == 5 and not alive:
            raise KeyboardInterrupt
        revived.append(revive_words(*given, **named))
        return revived[-1]

    monkeypatch.setattr(tokenizer_training, "revive_words", revive)
    # above 0.99 of an equal share a word that was not used once is dead
    words = _words(tiny, "train.steps=6", "objective.revive=0.995", "output.checkpoint_every=3")
    _run([*words, f"output.dir={tmp_path / 'whole'}"])
    assert sum(revived[:3]) > 0 and sum(revived[3:]) > 0
    expected, alive = revived[3:], False
    revived.clear()
    with pytest.raises(KeyboardInterrupt):
        _run([*words, f"output.dir={tmp_path / 'cut'}"])
    gc.collect()  # the lock of the folder
    alive = True
    revived.clear()
    _run([*words, f"output.dir={tmp_path / 'cut'}"])
    assert revived == expected
    whole, cut = (_last_weights(tmp_path / run) for run in ("whole", "cut"))
    assert "share_V" in whole and [n for n in whole if not torch.equal(whole[n], cut[n])] == []


def _last_weights(run: Path) -> Mapping[str, torch.Tensor]:
    path = checkpoint.latest(run / "checkpoints")
    assert path is not None
    return checkpoint.load(path).weights


def _rank(rank: int, world: int, port: int, folder: str, words: list[str]) -> None:
    """A rank that notes what it revives, and keeps its own weights."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    noted = []

    def revive(trainee: DvaeTrainee, count_V: torch.Tensor, **named: Any) -> int:
        noted.append((float(count_V.sum()), revive_words(trainee, count_V, **named)))
        weights = {**trainee.state_dict(), **named["average"].state_dict(prefix="average.")}
        torch.save((noted, weights), Path(folder) / f"{rank}.pt")
        return noted[-1][1]

    with mock.patch.object(tokenizer_training, "revive_words", revive):
        _run(words)


@pytest.mark.slow
def test_ranks_revive_the_same_words_by_the_tokens_of_all(tiny: list[str], tmp_path: Path) -> None:
    """Each by itself, since weights are whole at stage 0: they must not drift apart."""
    words = _words(tiny, "train.steps=5", "objective.revive=0.995", "engine.runtime=deepspeed",
                   "engine.zero_stage=0", f"output.dir={tmp_path / 'run'}")  # fmt: skip
    mp.spawn(_rank, args=(2, free_port(), str(tmp_path), words), nprocs=2)
    (noted, first), (theirs, second) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)
    )
    assert noted == theirs and len(noted) == 5 and sum(count for _, count in noted) > 0
    assert {tokens for tokens, _ in noted} == {8 * 16.0}, "of both ranks: 8 views of 4 x 4 words"
    assert "share_V" in first and [n for n in first if not torch.equal(first[n], second[n])] == []


@pytest.mark.parametrize(("config", "name", "patch"), [("tokenizer", "dvae", 8),
                                                       ("vqkd", "vqkd", 16)])  # fmt: skip
def test_the_command_that_is_named_at_the_end_can_be_pasted(
    config: str, name: str, patch: int, shards: Shards, tmp_path: Path
) -> None:
    """It is read again, its grids agree, and its images are those of the training."""
    sets = f"[{{shards: {shards.train}, weight: 2.5}}, {{shards: {shards.heldout}}}]"
    given = load_tokenizer_config(
        ROOT / "configs" / f"{config}.yaml",
        ["data.token_size=64", f"data.train={sets}", "data.heldout=null",
         "data.heldout_fraction=0.25", "data.heldout_limit=7"],
    )  # fmt: skip
    said = what_next(given, {}, tmp_path / "a run", name=name, patch=patch, remedy="")
    command, _, words = said.partition(" tools/pretrain.py ")
    assert command == "Next: deepspeed"
    read = load_config(ROOT / "configs" / "default.yaml", shlex.split(words))
    assert read.tokenizer.name == name
    assert read.data.image_size // read.encoder.patch_size == read.data.token_size // patch
    assert read.tokenizer.model_dump()["path"] == str(tmp_path / "a run" / "tokenizer.safetensors")
    images = set(SourceConfig.model_fields)
    assert read.data.model_dump(include=images) == given.data.model_dump(include=images)
    collapsed = what_next(given, {"warning": "it has collapsed"}, tmp_path, name=name, patch=patch,
                          remedy="with a lower lr")  # fmt: skip
    assert collapsed.startswith("Next: train it again with a lower lr;")


def test_a_width_that_dall_e_cannot_build_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.width.*multiple of 4"):
        load_tokenizer_config(ROOT / "configs" / "tokenizer.yaml", ["model.width=30"])


def test_revival_needs_whole_weights(tiny: list[str], tmp_path: Path) -> None:
    words = _words(tiny, f"output.runs_dir={tmp_path}", "train.steps=4", "objective.revive=0.1",
                   "engine.zero_stage=1")  # fmt: skip
    with pytest.raises(UserError, match=r"set engine\.zero_stage=0, or objective\.revive=0"):
        _run(words)
    assert list(tmp_path.iterdir()) == []
