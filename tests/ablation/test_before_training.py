"""What a study finds out before anything is trained: arms that break, tokens, space on the disk."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

from mimkit import build
from mimkit.ablation.jobs import at_home, fill_bank, shared_banks
from mimkit.ablation.plan import make_plan
from mimkit.ablation.report import load_record
from mimkit.ablation.wording import paired_lines
from mimkit.audit.cost import measure
from mimkit.banks import open_banks
from mimkit.cli import main
from mimkit.config import load_study_config
from mimkit.errors import UserError

FALLS = """
from mimkit.models.stems.linear import Linear
class Falls(Linear):
    calls = 0
    def forward(self, image_BCHW, mask_BN=None):
        Falls.calls += 1
        if Falls.calls > 4:  # when it is tried, it holds
            raise RuntimeError("it fell")
        return super().forward(image_BCHW, mask_BN)
"""


@pytest.fixture
def falling(tiny_study: Path, tmp_path: Path) -> list[str]:
    """The command of a study with a stem that raises while it is timed."""
    (tmp_path / "falls.py").write_text(FALLS)
    return ["ablate_stems", "--config", str(tiny_study), f"folder={tmp_path}/s", "seeds=[0]",
            "arms.hmlp=null",
            f"arms.falls.settings.stem.name={tmp_path}/falls.py:Falls"]  # fmt: skip


def test_a_part_that_raises_is_left_out_and_the_others_are_timed() -> None:
    class Raises(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            raise OSError("no")

    failed: dict[str, Exception] = {}
    parts = {"bad": (Raises(), torch.ones(1)), "good": (nn.Linear(1, 1), torch.ones(1, 1))}
    found = measure(parts, rounds=2, bf16=False, progress=lambda rounds: rounds,
                    failed=failed.setdefault)  # fmt: skip
    assert list(found) == ["good"] and found["good"].train > 0
    assert list(failed) == ["bad"] and isinstance(failed["bad"], OSError)
    with pytest.raises(OSError, match="no"):
        measure(parts, rounds=2, bf16=False, progress=lambda rounds: rounds)


def test_an_arm_that_cannot_be_measured_is_named_and_left_out(
    falling: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*falling, "--dry-run"]) == 1
    said = capsys.readouterr().out
    assert (
        "falls                is left out, measuring its cost failed: RuntimeError: it fell" in said
    )
    assert "tiny: 2 arms x 1 seeds" in said
    assert main([*falling, "--report"]) == 1
    record = load_record(tmp_path / "s")
    assert record["failures"] == [{"arm": "falls", "seed": None, "what": "measuring its cost",
                                   "error": "RuntimeError: it fell",
                                   "log": "logs/falls-cost.log"}]  # fmt: skip
    assert ["falls", 0] in record["missing"] and list(record["arms"]) == ["linear", "two_blocks"]
    page = (tmp_path / "s" / "report" / "report.md").read_text(encoding="utf-8")
    assert "- falls, all seeds, measuring its cost: RuntimeError: it fell" in page
    assert "falls.py" in (tmp_path / "s" / "logs" / "falls-cost.log").read_text()


@pytest.mark.slow
def test_the_others_run(falling: list[str], tmp_path: Path) -> None:
    assert main(falling) == 1
    record = load_record(tmp_path / "s")
    assert record["missing"] == [["falls", 0]]
    assert [run["arm"] for run in record["runs"] if run["accuracy"]] == ["linear", "two_blocks"]
    assert "falls" in (tmp_path / "s" / "study.yaml").read_text()


def test_a_reference_that_cannot_be_measured_ends_the_study(
    falling: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*falling, "reference=falls", "arms.two_blocks.declares=[encoder.depth]"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "arm 'falls' is the reference, and its cost cannot be measured: RuntimeError" in said


def test_arms_have_a_bank_for_each_kind_of_tokens_that_opens_for_them(
    tiny_study: Path, tmp_path: Path
) -> None:
    pixels = (
        "arms.pixels={settings: {stem: {name: linear}, tokenizer: {name: pixels}, data: "
        "{token_size: 64}}, declares: [tokenizer.name, tokenizer.path, data.token_size]}"
    )
    crops = ("arms.crops={settings: {stem: {name: linear}, data: {view_seed: 3}}, declares: "
             "[data.view_seed]}")  # fmt: skip
    plan = make_plan(load_study_config(tiny_study, [
        pixels, crops, "arms.two_blocks=null", "control=null", f"folder={tmp_path}"]))  # fmt: skip
    banks = shared_banks(plan, plan.runs)
    assert [(bank.seed, [(run.arm, run.seed) for run in bank.runs]) for bank in banks] == [
        (0, [("linear", 0), ("hmlp", 0)]),
        (3, [("crops", 0), ("crops", 1)]),
        (1, [("linear", 1), ("hmlp", 1)]),
    ]
    assert len({bank.folder for bank in banks}) == 3
    train, heldout = build.build_data(plan.arms["linear"].data)
    for bank in banks:
        epochs = bank.epochs(train.epoch_length)
        assert epochs == 1 and not bank.done(epochs)
        fill_bank(bank.config, bank.folder, epochs)
        assert bank.done(epochs)
        for run in bank.runs:
            config = at_home(run, bank=bank.folder, threads=1)
            open_banks(config, build.build_tokenizer(config), train, heldout, steps=4)
    with pytest.raises(UserError):
        wrong = at_home(banks[1].runs[0], bank=banks[0].folder, threads=1)
        open_banks(wrong, build.build_tokenizer(wrong), train, heldout, steps=4)


def test_the_report_says_whose_data_and_tokenizer_are_others() -> None:
    record = {"study": {"reference": "linear", "budget": "steps"}, "pairing": [],
              "facts": {"tokenizer": "abc"},
              "arms": {"linear": {"differs": [], "facts": {}},
                       "pixels": {"differs": [], "facts": {"tokenizer": "def"}}}}  # fmt: skip
    assert paired_lines(record)[-1] == (
        "data and tokenizer of linear: tokenizer abc; pixels has its own: tokenizer def"
    )


def test_a_disk_that_is_too_small_is_told_with_the_numbers_before_anything_starts(
    tiny_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    free = namedtuple("free", "free")
    words = ["ablate_stems", "--config", str(tiny_study), f"folder={tmp_path}/s", "seeds=[0]"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free(10_000_000))
    for more in (["--dry-run"], []):
        assert main([*words, *more]) == 2
        said = capsys.readouterr()
        needed = said.out.partition(" GB of disk")[0].rpartition(" ")[2]
        error = " ".join(said.err.split())
        assert f"needs {needed} GB, and 0.0100 GB are free in {tmp_path}" in error
        few = float(error.partition(" GB too few")[0].rpartition(" ")[2])
        assert few == pytest.approx(float(needed) - 0.01, abs=1e-4)
        assert not (tmp_path / "s" / "jobs").exists()
    assert main([*words, "--report"]) == 0, "which writes next to nothing"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free(10_000_000_000))
    assert main([*words, "--dry-run"]) == 0


def test_an_arm_whose_stem_cannot_be_built_is_named_with_the_line(
    tiny_study: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(
        "from mimkit.models.stems.linear import Linear\n"
        "class Bad(Linear):\n"
        "    def __init__(self, *, width: int, patch_size: int = 16) -> None:\n"
        "        raise KeyError('no such plan')\n"
    )
    study = load_study_config(tiny_study, [f"arms.bad.settings.stem.name={tmp_path}/bad.py:Bad"])
    with pytest.raises(UserError, match=r"arm 'bad': a part cannot be built: KeyError: 'no such "
                       r"plan' \(.*bad\.py, line 4\)"):  # fmt: skip
        make_plan(study)
