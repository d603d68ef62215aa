"""`tools/audit.py mask` as a user gives it."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, command
from PIL import Image

from mimkit.cli import main
from mimkit.cli._audit import parse_part
from mimkit.errors import UserError
from mimkit.masks import MASKS

QUICK = ["--grid", "6", "9", "--draws", "200"]
HEAVY = {"torch", "numpy", "scipy", "matplotlib", "timm", "PIL"}


def audit(*words: str | Path) -> int:
    return main(["audit", "mask", *map(str, words)])


def test_the_table_and_the_json_have_every_mask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(*QUICK, "--json", tmp_path / "new" / "masks.json") == 0
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "new" / "masks.json").read_text())
    assert [row["mask"] for row in rows] == MASKS.names()
    for row in rows:
        assert (row["grid"], row["count"], row["draws"]) == ([6, 9], 21, 200)  # 54 * 75 / 196
        marginal = np.array(row["marginal"])
        assert marginal.shape == (6, 9)
        assert (row["min_cell"], row["max_cell"]) == (marginal.min(), marginal.max())
        assert marginal.sum() == pytest.approx(row["mean_count"])
        if MASKS[row["mask"]](grid=(6, 9), num_masked=21).exact:
            assert (row["exact"], row["least_count"]) == (1.0, 21)
        else:
            assert row["exact"] < 1.0 and row["mean_count"] < 21
        assert 0 < row["symmetric"] <= 1
        assert row["us_per_mask"] > 0
        line = next(line for line in out.splitlines() if line.split()[:1] == [row["mask"]])
        assert line.split()[1:4] == [f"{row['exact']:.1%}", f"{row['mean_count']:.2f}",
                                     f"{row['min_cell']:.1%}"]  # fmt: skip
    assert "21 of 54 patches, 6 x 9; 200 draws of each mask" in out
    table = out.split("\n\n")[1].splitlines()
    assert len({len(line) for line in table}) == 1, "the columns are aligned"


def test_settings_of_a_mask_count_and_seed_are_used(tmp_path: Path) -> None:
    chosen = ["blockwise:min_block=2,max_block=2,aspect=1.0", "blockwise"]
    for seed in "01":
        assert audit(*QUICK, "--mask", *chosen, "--count", "12", "--seed", seed, "--json",
                     tmp_path / f"{seed}.json") == 0  # fmt: skip
    (small, plain), (other, _) = (json.loads((tmp_path / f"{s}.json").read_text()) for s in "01")
    assert [small["mask"], plain["mask"]] == chosen
    assert (small["count"], small["least_feasible"]) == (12, 2)
    assert small["blocks"] > plain["blocks"] + 1
    assert small["marginal"] != other["marginal"]


def test_pictures_show_something_for_every_mask(tmp_path: Path) -> None:
    assert audit("--mask", "blockwise:aspect=0.5", "random", "--draws", "100", "--picture",
                 tmp_path / "pictures") == 0  # fmt: skip
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [path.name for path in pictures] == ["mask-blockwise-aspect=0.5-14x14-75.png",
                                                "mask-random-14x14-75.png"]  # fmt: skip
    pixels = [np.asarray(Image.open(path).convert("RGB")) for path in pictures]
    assert all(min(image.shape[:2]) > 500 for image in pixels)
    assert pixels[0].shape == pixels[1].shape
    assert (pixels[0] != pixels[1]).any(2).mean() > 0.1  # another marginal, other masks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mask", "blockwse"], "no mask called 'blockwse'. Did you mean 'blockwise'?"),
        (["--mask", "random", "blockwise:min_blok=3"], "Did you mean 'min_block'?"),
        (["--mask", "blockwise:aspect=2"], "mask.aspect is 2.0"),
        (["--mask", "blockwise:aspect=wide"], "mask.aspect: Input should be a valid number"),
        (["--mask", "blockwise:aspect"], "'aspect' in 'blockwise:aspect' is no setting; write"),
        (["--mask", "random:num_masked=3"], "give --count K"),
        (["--mask", "random:grid=3"], "give --grid H W"),
        (["--count", "0"], "--count is 0, but a grid of 14x14 has 196 patches; set --count to"),
        (["--count", "54", "--grid", "6", "9"], "set --count to 1..53"),
        (["--grid", "0", "9"], "--grid is 0 9; a mask needs at least 2 patches"),
        (["--grid", "-3", "-3"], "--grid is -3 -3"),
        (["--draws", "0"], "--draws is 0; set it to a number from 1"),
        (["--seed", "-1"], "--seed is -1; set it to a number from 0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_drawn(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(*words, "--json", tmp_path / "masks.json") == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    for flag, path in (
        ("--json", tmp_path / "taken" / "a.json"),
        ("--picture", tmp_path / "taken"),
        ("--json", tmp_path),
    ):
        with pytest.raises(SystemExit) as ended:  # before anything is drawn
            audit(*QUICK, "--mask", "random", flag, path)
        captured = capsys.readouterr()
        assert ended.value.code == 2 and captured.out == ""
        assert f"argument {flag}: '{path}'" in " ".join(captured.err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_help_is_told_by_the_door_of_the_folder_tools() -> None:
    ended = command(["tools/audit.py", "mask", "--help"], cwd=ROOT)
    assert ended.code == 0
    assert "--mask blockwise:min_block=4,aspect=0.5" in ended.out
    ended = command(["tools/audit.py"], cwd=ROOT)
    assert ended.code == 2
    assert "WHAT" in ended.err


def test_help_does_not_wait_for_torch() -> None:
    code = ("import sys; from mimkit.cli import main\n"
            "try:\n  main(['audit', 'mask', '--help'])\n"
            "except SystemExit: print('LOADED', *sys.modules)")  # fmt: skip
    ended = command(["-c", code], cwd=ROOT)
    loaded = ended.out.partition("LOADED")[2].split()
    assert "mimkit.cli._audit.mask" in loaded
    assert HEAVY.isdisjoint(loaded)


def test_a_part_is_its_name_and_settings_of_yaml() -> None:
    part = parse_part("levit:norm=ln, width=8,scale=1.5,gelu=true,depth=null")
    assert part.name == "levit"
    assert part.settings == {"norm": "ln", "width": 8, "scale": 1.5, "gelu": True, "depth": None}
    assert parse_part("levit").settings == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("levit:", "'' in 'levit:' is no setting; write NAME"),
        ("levit:norm=", "'norm=' in 'levit:norm=' is no setting"),
        (":norm=ln", "'norm=ln' in ':norm=ln' is no setting"),
        ("levit:norm=ln,norm=bn", "'norm' is given twice"),
        ("levit:name=conv", "'name' is given twice"),
        ("levit:norm=[", "the value of 'norm' in 'levit:norm=[' is not valid YAML"),
    ],
)
def test_a_part_of_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_part(text)
    assert message in str(caught.value)
