"""Training with a token bank: the losses of training without it, and no tokenizer in the step."""

import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from commands import ROOT, command, pretrain

from mimkit import build
from mimkit.audit.bank_cost import BankCost, StepTime
from mimkit.banks import fill, halves, open_banks
from mimkit.batch import to_unit
from mimkit.cli import main
from mimkit.config import Config, load_config
from mimkit.data.loader import slot_loader
from mimkit.data.sampler import Slot

DEFAULT = ROOT / "configs" / "default.yaml"
CPU = torch.device("cpu")


def config_of(words: list[str]) -> Config:
    return load_config(DEFAULT, words)


@pytest.fixture(scope="module")
def bank(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs, by the command, with a loader process."""
    out = tmp_path_factory.mktemp("banks") / "bank"
    assert main(["make_tokens", str(out), "--epochs", "2", *tiny]) == 0
    return out


def metrics(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"}
            for line in lines if line["kind"] != "checkpoint"]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["seed=1", "data.view_seed=0"],  # other order, masks and weights; the crops of the bank
        pytest.param(["stem=linear", "mask=random", "engine.workers=2"], marks=pytest.mark.slow),
        pytest.param(["encoder.size=Ti2x2", "encoder.depth=null"], marks=pytest.mark.slow),
    ],
)
def test_losses_with_a_bank_are_those_without(bank, tiny, words, tmp_path: Path) -> None:
    """To the last bit, over the end of the first epoch: 14 updates of 8 among 96 images."""
    words = [*tiny, "train.steps=14", *words]
    words = [word for word in words if word != "encoder.depth=1" or "x2" not in str(words)]
    assert pretrain([*words, f"output.dir={tmp_path / 'without'}"]) == 0
    with mock.patch("mimkit.tokenizers.dvae.DvaeTokenizer.encode") as encode:
        encode.side_effect = _only_pictures
        words += [f"engine.token_bank={bank}", f"output.dir={tmp_path / 'with'}"]
        assert pretrain(words) == 0
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")
    with_bank, without = (json.loads((tmp_path / name / "summary.json").read_text())
                          for name in ("with", "without"))  # fmt: skip
    same = {"heldout_loss", "unigram_entropy", "position_loss", "knn_top1"}
    assert {k: with_bank[k] for k in same} == {k: without[k] for k in same}


def _only_pictures(view_BChw: torch.Tensor) -> torch.Tensor:
    """The only one to ask the tokenizer is the picture of eight held-out images."""
    assert len(view_BChw) == 8 and view_BChw.shape[-1] == 32
    return torch.zeros(8, 16, dtype=torch.int64)


def test_no_second_view_is_rendered(bank: Path, tiny: list[str]) -> None:
    config = config_of([*tiny, f"engine.token_bank={bank}"])
    tokenizer = build.build_tokenizer(config)
    train, heldout = build.build_data(config.data)
    banks = open_banks(config, tokenizer, train, heldout, steps=6)
    loader = slot_loader(source=train, view=build.build_views(config.data, "patches"), seed=0,
                         batches=[[Slot(0, 3)]], workers=0)  # fmt: skip
    (batch,) = loader
    assert batch.token_view_BChw.shape == (1, 3, 0, 0)
    assert batch.patch_view_BCHW.shape == (1, 3, 32, 32)
    assert banks.train.row(0, 3).dtype == np.uint16


def test_rows_are_the_tokens_of_the_views_that_training_sees(bank: Path, tiny: list[str]) -> None:
    """Sample by sample, one at a time, in both epochs; and of the held-out centre views."""
    config = config_of([*tiny, f"engine.token_bank={bank}"])
    tokenizer = build.build_tokenizer(config)
    train, heldout = build.build_data(config.data)
    banks = open_banks(config, tokenizer, train, heldout, steps=20)
    assert banks.heldout is not None
    for source, view, found, epochs in (
        (train, build.build_views(config.data), banks.train, (0, 1)),
        (heldout, build.build_probe_view(config.data), banks.heldout, (0,)),
    ):
        for epoch in epochs:
            slots = [[Slot(epoch, sample)] for sample in (0, 5, len(source) - 1)]
            loader = slot_loader(source=source, view=view, seed=config.seed, batches=slots,
                                 workers=0)  # fmt: skip
            for ((_, sample, *_),), batch in zip(slots, loader, strict=True):
                expected_N = tokenizer.encode(to_unit(batch.token_view_BChw))[0]
                assert (found.row(epoch, sample) == expected_N.numpy()).all()
    assert (banks.train.row(0, 0) != banks.train.row(1, 0)).any(), "epochs have other crops"


def test_copies_of_a_weighted_set_have_rows_of_their_own(tiny: list[str], tmp_path: Path) -> None:
    config = config_of(tiny)
    pattern = config.data.train
    sets = [{"shards": pattern, "weight": 1.5}]
    data = config.data.model_copy(update={"train": type(config.data)(train=sets).train})
    config = config.model_copy(update={"data": data})
    tokenizer = build.build_tokenizer(config)
    train, _ = build.build_data(config.data)
    (half,) = halves(config, tokenizer, train, None)
    assert len(half.rows(0)) == 144 and half.binding["num_samples"] == 192
    fill(half, tmp_path, tokenizer, epochs=1, device=CPU)
    config = config.model_copy(
        update={"engine": config.engine.model_copy(update={"token_bank": str(tmp_path)})}
    )
    banks = open_banks(config, tokenizer, train, None, steps=18)
    twice = [row for row in half.rows(0) if row >= 96]
    assert any((banks.train.row(0, r) != banks.train.row(0, r - 96)).any() for r in twice)


def test_seeds_that_share_crops_share_a_bank_of_the_rows_of_any_seed(tiny: list[str]) -> None:
    """A weight of 1.5 takes other samples twice with every seed: one seed's bank lacks some."""
    halves_of = {}
    for seed, view_seed in ((0, None), (0, 0), (1, 0)):
        config = config_of([*tiny, f"seed={seed}"])
        train = type(config.data)(train=[{"shards": config.data.train, "weight": 1.5}]).train
        data = config.data.model_copy(update={"train": train, "view_seed": view_seed})
        config = config.model_copy(update={"data": data})
        source, _ = build.build_data(config.data)
        (halves_of[seed, view_seed],) = halves(config, build.build_tokenizer(config), source, None)
    alone, shared, other = halves_of.values()
    assert len(alone.rows(0)) == 144 and shared.rows(0) == other.rows(0) == list(range(192))
    assert shared.binding == other.binding != alone.binding


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=1"], "seed: the bank has 0, this run 1"),
        (["data.jitter=0.3"], "'jitter': 0.4}, this run {'jitter': 0.3}"),
        (["data.subset=0.5"], "data: the bank has"),
        (["data.heldout_limit=12"], "heldout_limit"),
        (["train.steps=30"], "holds tokens of 2 epochs, and this run needs 3"),
        (["engine.token_bank=nowhere"], "nowhere/train is no token bank"),
        (["tokenizer=pixels", "tokenizer.patch=8"], "has no words"),
    ],
)
def test_a_bank_that_does_not_fit_is_refused_before_training(
    bank: Path, tiny: list[str], tmp_path: Path, words: list[str], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if words[0] == "tokenizer=pixels":
        tiny = [word for word in tiny if not word.startswith("tokenizer.path")]
    given = [*tiny, f"engine.token_bank={bank}", f"output.dir={tmp_path / 'run'}", *words]
    assert pretrain(given) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_an_interrupted_command_goes_on_and_ranks_share_the_work(
    bank: Path, tiny: list[str], tmp_path: Path
) -> None:
    """Each of two ranks by itself, one after the other; the same files come out."""
    out = tmp_path / "shared"
    for rank in ("1", "0", "1"):
        words = ["-m", "mimkit", "make_tokens", out, "--epochs", "2", "--workers", "0", *tiny]
        ended = command(words, cwd=tmp_path, env={"RANK": rank, "WORLD_SIZE": "2"})
        assert ended.code == 0, ended.err
    names = sorted(str(path.relative_to(bank)) for path in bank.rglob("*") if path.is_file())
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) == names
    assert all((out / name).read_bytes() == (bank / name).read_bytes() for name in names)


def test_the_estimate_says_what_it_costs_and_saves(tiny, tmp_path: Path, capsys) -> None:
    words = ["--estimate", "--epochs", "100", "--runs", "40", *tiny]
    code = main(
        ["make_tokens", str(tmp_path / "bank"), *words, f"output.runs_dir={tmp_path / 'r'}"]
    )
    assert code == 0
    said = capsys.readouterr().out
    assert "100 epochs of 96 images, 16 tokens each: 0.000307 GB" in said
    pays = re.search(r"each run, which trains on 48 images, saves 0\.\d+ s of the tokenizer .*\n"
                     r"it pays from run number (\d+) on", said)  # fmt: skip
    assert pays is not None and int(pays[1]) > 20  # the bank has 200 times the images of a run
    shares = re.search(r"tokens: ([\d.]+)% without a bank \(20 real updates of 8 images: "
                       r"[\d.]+ ms an image\), ([\d.]+)% with one bank for 40;", said)  # fmt: skip
    assert shares is not None and all(0 < float(share) < 100 for share in shares.groups())
    assert list(tmp_path.iterdir()) == []


def test_the_share_of_tokens_in_a_study() -> None:
    """By hand: 1,000 images at 2 + 3 ms make a bank in 5 s; a run of them at 10 ms, of which 30 %
    are the tokenizer's, takes 7 s without it."""
    cost = BankCost(64, 16, 0.0, render_ms=2.0, encode_ms=3.0, second_view_ms=1.0)
    step = StepTime(updates=20, batch=64, ms=10.0, tokenizer_share=0.3)
    study = step.of_study(cost, bank_images=1000, run_images=1000)
    assert study.without_bank == pytest.approx(0.3)
    assert study.with_bank(runs=1) == pytest.approx(5 / 12)
    assert study.with_bank(runs=10) == pytest.approx(5 / 75)
    assert study.with_bank(runs=30) == pytest.approx(5 / 215)
    assert study.runs_for(0.02) == 35 and study.with_bank(runs=35) == pytest.approx(0.02)
    assert study.runs_for(0.9) == 1
    assert cost.tokenizer_saved_s(1000) == 3 and cost.rendering_saved_s(1000) == 1
    assert cost.pays_from(bank_images=1000, run_images=1000) == 2  # 5 s, and 4 s a run
    assert cost.pays_from(bank_images=1000, run_images=20) == 63  # 0.08 s a run
    assert cost.pays_from(bank_images=1000, run_images=10_000) == 1
    slower = BankCost(64, 16, 0.0, render_ms=2.0, encode_ms=3.0, second_view_ms=-0.5)
    assert slower.rendering_saved_s(1000) == 0  # noise of the clock is no loss
    longer = step.of_study(cost, bank_images=1000, run_images=4000)
    assert longer.with_bank(runs=10) == pytest.approx(5 / 285)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "0"], "--epochs is 0"),
        (["--runs", "0", "--estimate"], "--runs is 0; set it to 1 or more"),
        (["--runs", "3"], "give --estimate with it"),
        (["engine.token_bank=x"], "is for pretraining"),
        (["tokenizer.path=nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_bad_input_of_the_command(tiny, tmp_path: Path, words, message, capsys) -> None:
    assert main(["make_tokens", str(tmp_path / "bank"), *tiny, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "bank").exists()


def test_targets_that_are_no_words_are_refused_before_anything_is_measured(
    tiny, tmp_path: Path, capsys
) -> None:
    words = [word for word in tiny if not word.startswith("tokenizer.")]
    words += ["tokenizer=pixels", "tokenizer.patch=8", f"output.runs_dir={tmp_path}"]
    assert main(["make_tokens", str(tmp_path / "bank"), "--estimate", *words]) == 2
    assert "has no words" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
