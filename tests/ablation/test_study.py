"""A whole study, its report, and what happens when it is run again, grows, or fails in part."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import pretrain
from PIL import Image

from mimkit.ablation.report import load_record
from mimkit.ablation.tables import percent
from mimkit.cli import main
from mimkit.config import load_study_config
from mimkit.downstream.predictions import load_predictions


@pytest.fixture(scope="module")
def finished(tiny_study: Path) -> Path:
    """The folder of the tiny study, run to its end by the command."""
    assert main(["ablate_stems", "--config", str(tiny_study)]) == 0
    return tiny_study.parent / "study"


def _runs(folder: Path) -> dict[str, int]:
    """When each run was finished."""
    return {path.parent.name: path.stat().st_mtime_ns
            for path in (folder / "runs").glob("*-seed*/summary.json")}  # fmt: skip


def _record(folder: Path) -> dict[str, Any]:
    return load_record(folder)


def test_every_run_is_there_and_the_table_is_what_its_predictions_say(finished: Path) -> None:
    record = _record(finished)
    assert len(_runs(finished)) == 6 and record["missing"] == []
    for run in record["runs"]:
        [file] = (finished / run["folder"] / "probes").glob("*/knn.safetensors")
        predictions = load_predictions(file)
        assert run["accuracy"]["knn"] == float(predictions.correct.double().mean())
        most = np.bincount(predictions.label_B).max() / len(predictions)
        assert record["most_common_class"] == {"knn": most}
    linear = [run["accuracy"]["knn"] for run in record["runs"] if run["arm"] == "linear"]
    assert record["arms"]["linear"]["means"]["knn"][0] == pytest.approx(np.mean(linear))
    assert {one["against"] for one in record["comparisons"]["knn"]} == {"linear", "two_blocks"}
    assert record["arms"]["two_blocks"]["differs"] == ["encoder.depth: 1 -> 2"]


def test_a_run_of_a_study_is_bit_for_bit_the_run_of_the_main_command(
    finished: Path, tmp_path: Path
) -> None:
    """Which has no token bank, and another process."""
    [run] = (finished / "runs").glob("hmlp-seed1-*")
    config = tmp_path / "config.yaml"
    shutil.copy(run / "config.yaml", config)
    alone = tmp_path / "alone"
    assert pretrain(["--config", str(config), f"output.dir={alone}", "engine.token_bank=null"]) == 0

    def losses(folder: Path) -> list[float]:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line).get("loss") for line in lines]

    assert losses(alone) == losses(run)
    assert (finished / "banks").is_dir()


def test_the_report_says_what_the_record_says(finished: Path) -> None:
    record = _record(finished)
    html, markdown = ((finished / "report" / name).read_text(encoding="utf-8")
                      for name in ("index.html", "report.md"))  # fmt: skip
    for text in (html, markdown):
        assert all(sentence in text for sentence in record["verdict"]["sentences"])
        assert "83.43 ±0.10" in text, "the paper's hMLP"
        assert record["facts"]["tokenizer"] in text
    for file in re.findall(r"\]\((.*?)\)", markdown):
        assert (finished / "report" / file).is_file()


def test_csv_and_pictures_hold_the_same_runs(finished: Path) -> None:
    with (finished / "report" / "report.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    record = _record(finished)
    assert {(row["arm"], row["seed"], float(row["accuracy"])) for row in rows} == {
        (run["arm"], str(run["seed"]), run["accuracy"]["knn"]) for run in record["runs"]
    }
    with Image.open(finished / "report" / "pictures" / "reconstructions.png") as picture:
        assert picture.width > 5 * 112, "three columns, and one for each arm that has pictures"


def test_run_again_it_trains_nothing_and_a_seed_more_trains_that_seed(
    finished: Path, tiny_study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _runs(finished)
    words = ["ablate_stems", "--config", str(tiny_study)]
    assert main([*words, "--dry-run", "seeds=[0,1,2]"]) == 0
    assert "9 runs, 6 finished" in capsys.readouterr().out
    assert _runs(finished) == before
    grown = ["seeds=[0,2]", "arms.two_blocks=null", "control=null"]
    assert main([*words, *grown]) == 0
    after = _runs(finished)
    assert before.items() <= after.items() and len(after) == 8
    assert main([*words, "--report"]) == 0  # the report of the first study again
    assert _record(finished)["study"]["seeds"] == [0, 1]


def test_an_arm_that_fails_is_in_the_report_and_stops_no_other(
    finished: Path, tiny_study: Path, broken_stem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = f"arms.broken.settings.stem.name={broken_stem}"
    words = ["ablate_stems", "--config", str(tiny_study), "--report", stem]
    assert main(words) == 0  # nothing is trained, what is there is reported
    assert ["broken", 0] in _record(finished)["missing"]
    capsys.readouterr()
    words.remove("--report")
    assert main([*words, "seeds=[0]"]) == 1
    record = _record(finished)
    [failure] = record["failures"]
    assert failure["arm"] == "broken" and "the stem fell off" in failure["error"]
    assert (finished / failure["log"]).is_file()
    page = (finished / "report" / "index.html").read_text(encoding="utf-8")
    assert "the stem fell off" in page
    assert "with one seed" in record["verdict"]["sentences"][0]
    assert {one["arm"] for one in record["comparisons"]["knn"]} >= {"hmlp", "two_blocks"}


def test_two_reports_are_laid_side_by_side(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = json.loads((finished / "report" / "report.json").read_text(encoding="utf-8"))
    other["name"], other["study"]["seeds"] = "other", [7]
    other["settings"]["data"]["image_size"] = 64  # resolved; the study gives 32
    other["measures"], other["arms"]["new"] = ["linear"], other["arms"].pop("two_blocks")
    for one in other["arms"].values():
        one["means"] = {"linear": [0.5, None, None]}
    other["comparisons"] = {"linear": []}
    (tmp_path / "report.json").write_text(json.dumps(other), encoding="utf-8")
    assert main(["ablate_stems", "--compare", str(finished), str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "# tiny and other" in said and "-> [7]" in said
    assert "- settings.data.image_size: 32 -> 64\n" in said
    assert "- arm two_blocks: in the first only\n- arm new: in the second only\n" in said
    assert "| first, minus linear | second, minus linear |" in said
    mean = percent(_record(finished)["arms"]["hmlp"]["means"]["knn"])
    assert f"| knn | hmlp | {mean} | not measured |" in said
    assert "| linear | hmlp | not measured | 50.00 |" in said
    assert main(["ablate_stems", "--compare", str(finished), str(tmp_path / "none")]) == 2
    assert "there is no report in" in capsys.readouterr().err


def test_presets_and_files_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate_stems", "--preset", "quick", "--config", "mine.yaml"]) == 2
    assert "both name a study" in " ".join(capsys.readouterr().err.split())


def test_the_budget_of_flops_gives_dearer_arms_fewer_steps(
    finished: Path, tiny_study: Path
) -> None:
    from mimkit.ablation.machine import machine_slots
    from mimkit.ablation.study import prepare

    study = load_study_config(tiny_study, ["budget=flops", "settings.train.steps=40"])
    plan = prepare(study, machine_slots(jobs=1, ranks=1, visible=None), say=lambda text: None).plan
    steps = {arm: config.train.steps for arm, config in plan.arms.items()}
    assert steps["linear"] == 40
    assert steps["two_blocks"] is not None and 18 <= steps["two_blocks"] <= 26
