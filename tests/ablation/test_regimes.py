"""Finetuning and training from scratch in a study; arms that share a pretraining."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mimkit.ablation.report import load_record
from mimkit.cli import main
from mimkit.downstream.predictions import FILE, load_predictions

CLASSIFIER = {
    "base": "finetune_small",
    "settings": {
        "data": {"augment": None},
        "train": {"epochs": 1, "batch_size": 32},
        "engine": {"runtime": "local", "precision": "fp32", "workers": 0, "threads": 1},
        "output": {"tensorboard": False},
    },
}


@pytest.fixture(scope="module")
def attention_only(tiny_study: Path) -> list[str]:
    """The command of a study whose two arms differ in what is finetuned."""
    home = tiny_study.parent
    study = {
        "base": str(tiny_study),
        "name": "attention-only",
        "folder": str(home / "attention-only"),
        "arms": {
            "linear": None, "two_blocks": None, "hmlp": None,
            "all": {"settings": {"stem": {"name": "linear"}}},
            "attention": {"settings": {"stem": {"name": "linear"}},
                          "classifier": {"train": {"roles": ["attention"]}}},
        },
        "reference": "all",
        "control": None,
        "seeds": [0],
        "regimes": ["finetuning", "supervised"],
        "finetuning": CLASSIFIER,
        "supervised": CLASSIFIER,
        "primary": "finetuning",
    }  # fmt: skip
    path = home / "attention_only.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    return ["ablate_stems", "--config", str(path)]


@pytest.fixture(scope="module")
def trained(attention_only: list[str], tiny_study: Path) -> Path:
    assert main(attention_only) == 0
    return tiny_study.parent / "attention-only"


def test_arms_that_differ_in_their_classifier_share_a_pretraining(trained: Path) -> None:
    record = load_record(trained)
    assert record["missing"] == [] and record["failures"] == []
    every, attention = record["runs"]
    assert every["identity"] == attention["identity"]
    assert [path.name for path in (trained / "runs").glob("*-seed0-*")] == [
        f"all-seed0-{every['identity']}"
    ]
    assert len(list((trained / "runs").glob("*-seed0-*/finetuning-*"))) == 2
    assert len(list((trained / "supervised").glob("*-seed0-*"))) == 2
    trained_parameters = {
        json.loads(path.read_text())["trained_parameters"]
        for path in (trained / "runs").glob("*-seed0-*/finetuning-*/summary.json")
    }
    assert len(trained_parameters) == 2, "attention only trains fewer weights"


def test_accuracies_are_of_each_arms_own_predictions(trained: Path) -> None:
    record: dict[str, Any] = load_record(trained)
    folders = {"finetuning": "runs/*-seed0-*/finetuning-*", "supervised": "supervised/*-seed0-*"}
    for measure, pattern in folders.items():
        found = {}
        for folder in trained.glob(pattern):
            roles = yaml.safe_load((folder / "config.yaml").read_text())["train"]["roles"]
            hits = load_predictions(folder / "best" / FILE).correct
            found[roles[0]] = float(hits.double().mean())
        assert found == {run["arm"]: run["accuracy"][measure] for run in record["runs"]}


def test_what_a_run_took_is_of_all_its_jobs(trained: Path) -> None:
    for run in load_record(trained)["runs"]:
        own = [run["identity"], f"{run['identity']}-{run['arm']}-finetuning-*",
               f"{run['identity']}-{run['arm']}-supervised-*"]  # fmt: skip
        files = [file for name in own for file in (trained / "jobs").glob(f"{name}.json")]
        jobs = [json.loads(file.read_text()) for file in files]
        assert list(run["spent"]["jobs"]) == ["pretraining", "finetuning", "supervised"]
        for key, of_all in (("wall", sum), ("process", sum), ("memory_mib", max)):
            assert run["spent"][key] == pytest.approx(of_all(job[key] for job in jobs))
        assert run["spent"]["attempts"] == len(jobs) == 3
        page = (trained / "report" / "report.md").read_text(encoding="utf-8")
        assert f"| {run['spent']['wall']:.0f} | {run['spent']['process']:.0f} |" in page


def test_the_disk_that_is_estimated_is_what_an_arm_leaves(
    trained: Path, attention_only: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what passes: here, best weights that are written beside those before them."""
    words = [*attention_only, f"folder={tmp_path}/s", "arms.attention=null", "--dry-run"]
    assert main(words) == 0
    told = 1e9 * float(capsys.readouterr().out.partition(" GB of disk")[0].rpartition(" ")[2])
    [run] = (trained / "runs").glob("*-seed0-*")
    every = [one for one in (*run.glob("finetuning-*"), *trained.glob("supervised/*-seed0-*"))
             if "- attention" not in (one / "config.yaml").read_text()]  # fmt: skip
    best = [_weights(one / "best") for one in every]
    checkpoints = [_weights(one / "checkpoints") for one in (run, *every)]
    assert len(every) == 2
    assert told == pytest.approx(sum(checkpoints) + sum(best) + max(best), rel=0.02)


def _weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.resolve().rglob("*.safetensors"))


def test_run_again_nothing_is_trained_and_nothing_is_estimated(
    trained: Path, attention_only: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {path: path.stat().st_mtime_ns for path in (trained / "jobs").iterdir()}
    assert main(attention_only) == 0
    said = capsys.readouterr().out
    assert "2 runs, 2 finished; about 0 s" in said and "done in" not in said
    assert jobs == {path: path.stat().st_mtime_ns for path in (trained / "jobs").iterdir()}
    assert main([*attention_only, "--dry-run", "seeds=[0,1]"]) == 0
    assert "4 runs, 2 finished; about" in capsys.readouterr().out


def test_a_shared_pretraining_that_fails_is_tried_once_and_told_for_each_arm(
    trained: Path, attention_only: list[str], broken_stem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stems = [f"arms.{arm}.settings.stem.name={broken_stem}" for arm in ("all", "attention")]
    assert main([*attention_only, *stems, "seeds=[0]"]) == 1
    record = load_record(trained)
    assert [one["arm"] for one in record["failures"]] == ["all", "attention"]
    assert all("the stem fell off" in one["error"] for one in record["failures"])
    said = capsys.readouterr().out
    assert "[1/5] all, seed 0" in said and "[1/5] attention, seed 0" in said
    assert len(list((trained / "logs").glob(f"{record['runs'][0]['identity']}*"))) == 1
