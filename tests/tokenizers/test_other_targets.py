"""A tiny pretraining against each target that is not DALL-E's: it learns, is judged, and drawn."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from commands import pretrain
from PIL import Image

# What each needs at 4 x 4 patches of 8 pixels; {file} is the fixture `<part>_file`.
SETTINGS = {
    "pixels": [["patch=8"], ["patch=8", "normalise=none", "loss=l1"]],
    "hog": [["patch=8"]],
    "vqkd": [["path={file}"]],
    "features": [["path={file}"], ["path={file}", "normalise=none", "loss=smooth_l1"]],
}
CASES = [(name, settings) for name in SETTINGS for settings in SETTINGS[name]]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=[f"{n}-{s[-1]}" for n, s in CASES])
def test_it_learns_and_is_judged_and_drawn(
    name: str, settings: list[str], tiny: list[str], tmp_path: Path,
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "run"
    assert pretrain([*_words(name, settings, tiny, request), f"output.dir={run}"]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    heldout = [line["heldout_loss"] for line in lines if line["kind"] == "heldout"]
    assert losses[-1] < losses[0] and heldout[-1] < heldout[0]
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    assert summary["heldout_loss"] == heldout[-1]
    if name == "vqkd":
        assert summary["ln_vocab"] == pytest.approx(math.log(64))
    else:
        assert not summary.keys() & {"unigram_entropy", "heldout_accuracy", "ln_vocab"}
        said = capsys.readouterr().out
        means = [summary[name] for name in ("mean_target_loss", "mean_by_position_loss")]
        assert (f"Held-out loss: {heldout[-1]:.4f}. Always predicting the mean target costs "
                f"{means[0]:.4f}, the mean at each position {means[1]:.4f}:") in said  # fmt: skip
        assert "token bank" not in said
    if name == "features":  # a vector of a network has no picture
        assert not (run / "pictures").exists()
        return
    with Image.open(run / "pictures" / "step-00000006.png") as picture:
        assert picture.size == (4 * (128 + 4), 14 + 8 * (128 + 4))


def _words(
    name: str, settings: list[str], tiny: list[str], request: pytest.FixtureRequest
) -> list[str]:
    kept = [word for word in tiny if not word.startswith("tokenizer.")]
    needs_file = any("{file}" in setting for setting in settings)
    file = request.getfixturevalue(f"{name}_file") if needs_file else ""
    own = [f"tokenizer.{setting.format(file=file)}" for setting in settings]
    return [*kept, f"tokenizer={name}", *own, "train.steps=30", "stem=linear"]
