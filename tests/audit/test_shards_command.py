"""`tools/audit.py shards` as a user gives it: what it prints, writes and returns."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from commands import ROOT, Shards, command

from mimkit.cli import main
from mimkit.data.tar import scan_tar

QUICK = ["--view", "48", "--batch", "8"]


def audit(*words: str | Path) -> int:
    return main(["audit", "shards", *map(str, words)])


@pytest.fixture(autouse=True)
def home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index is found in the cache of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def cut(shards: Shards, tmp_path: Path) -> Path:
    """A copy of the set whose second tar ends after 20 kB, inside a sample's data."""
    folder = Path(shutil.copytree(shards.train, tmp_path / "train"))
    tar = folder / "train-00001.tar"
    tar.write_bytes(tar.read_bytes()[:20_000])
    return folder


def test_a_fit_set(shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "new" / "shards.json"
    assert audit(shards.train, "--against", shards.heldout, *QUICK, "--window", "3",
                 "--ranks", "2", "--json", where) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("fit: 96 images in 3 tars of ")
    assert "no problem, 0 warnings" in " ".join(out.split())
    assert "\nwarnings\n" not in out
    flat = " ".join(out.split())
    assert "3 tars: headers and end blocks; 3 SHA-256 sums of manifest.json; 3 index files" in flat
    assert "decoded 96 of 96, and their pixels compared" in flat
    assert "24 images in 1 tar, decoded 24; by their bytes and pixels, none is in both" in flat
    assert "48 x 48 pixels" in flat and "jpg 100.0%; RGB 100.0%" in flat
    assert "4, of each 24 images" in flat
    assert "12.00 updates of 8 images (2 ranks x 4): 12 whole, and 0 images left over" in flat
    assert "train.epochs=100 makes 1,200 updates" in flat
    assert "(48 and 24 pixels; CPU time over 96 images)" in flat
    assert all(len(line) <= 100 for line in out.splitlines()[1:])
    row = next(line for line in out.splitlines() if line.startswith("train-00001.tar"))
    assert row.split()[1] == "32" and row.split()[3:5] == ["ok", "ok"]
    record = json.loads(where.read_text())
    assert (record["fit"], record["samples"], record["problems"]) == (True, 96, [])
    assert [tar["samples"] for tar in record["tars"]] == [32, 32, 32]
    assert record["labels"]["counts"] == {str(label): 24 for label in range(4)}
    assert record["images"]["width"] == {"least": 48, "median": 48, "most": 48}
    assert record["epoch"]["whole"] == 12
    assert record["against"]["in_both"] == 0
    assert {"warnings", "decoded", "shuffle", "speed", "remedies"} <= set(record)


def test_a_damaged_set(cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(cut, *QUICK, "--json", tmp_path / "shards.json") == 1
    out = capsys.readouterr().out
    assert out.startswith("not fit: 1 problem (1 damaged_tar); 64 images in 3 tars of")
    lines = out.splitlines()
    (problem,) = json.loads((tmp_path / "shards.json").read_text())["problems"]
    assert set(problem) == {"kind", "shard", "key", "offset", "detail", "count"}
    assert (problem["kind"], problem["shard"]) == ("damaged_tar", str(cut / "train-00001.tar"))
    line = f"  train-00001.tar at byte {problem['offset']}: cut short: "
    assert any(text.startswith(line) for text in lines)
    assert "Fetch it again or write it again with tools/make_shards.py" in " ".join(out.split())
    row = next(text for text in lines if text.startswith("train-00001.tar"))
    assert row.split()[1] == "damaged"


def test_a_leak_names_both_places(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copy(shards.train / "train-00000.tar", tmp_path / "val.tar")
    where = tmp_path / "shards.json"
    assert audit(shards.train, "--against", copy, *QUICK, "--json", where) == 1
    out = capsys.readouterr().out
    member = next(m for m in scan_tar(Path(copy)) if m.extension == "jpg")
    flat = " ".join(out.split())
    assert "leak_between_splits (32): leave these images out of one split" in flat
    assert (f"train-00000.tar, '{member.key}' at byte {member.offset}: the same bytes as "
            f"'{member.key}' in {copy} at byte {member.offset}") in flat  # fmt: skip
    assert "... and 12 more; --json FILE lists all" in flat, "the first twenty are shown"
    assert len(json.loads(where.read_text())["problems"]) == 32
    assert "32 are in both" in flat


def test_every_kind_of_problem_is_shown(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that come after twenty of another kind."""
    folder = Path(shutil.copytree(shards.train, tmp_path / "train"))
    (folder / "classes.json").write_text('["a", "b"]')
    assert audit(folder, *QUICK) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "48 label_out_of_range, 1 class_count" in out
    assert "its label is 2, but classes.json names 0..1" in out
    assert "... and 28 more" in out
    assert "classes.json has 2 names, but manifest.json beside it says 4 classes" in out


def test_a_sample_is_said_to_be_one(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(shards.train, *QUICK, "--sample", "5") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "decoded 5 of 96 (drawn by --seed), and their pixels compared" in out


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE])
def test_names_in_a_tar_cannot_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: bytes
) -> None:
    """Neither the key of a bad image nor the name of a link."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("a\x1b[2Jb.jpg")
        member.type, member.size = kind, 4 if kind == tarfile.REGTYPE else 0
        tar.addfile(member, io.BytesIO(b"text"))
    assert audit(tmp_path / "a.tar") == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a\\x1b[2Jb" in out


def test_a_set_sorted_by_class_is_said_to_need_a_larger_window(
    tmp_path: Path, shards: Shards, capsys: pytest.CaptureFixture[str]
) -> None:
    from mimkit.data.sources.shards import ShardSource
    from mimkit.data.writer import Item, write_shard

    source = ShardSource(shards=str(shards.train))
    samples = [source[number] for number in range(96)]
    (tmp_path / "sorted").mkdir()
    for label in range(4):
        items = [Item(s.key, s.image, "jpg", label) for s in samples if s.label == label]
        write_shard(tmp_path / "sorted" / f"{label}.tar", items, split="train")
    assert audit(tmp_path / "sorted", *QUICK, "--window", "1") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "data.window=1 is too small for these 4 tars, in which the classes lie apart" in out
    assert "share their label in 100.0% of cases, in a full shuffle in 24.2%" in out
    assert "data.window=4 suffices" in out
    assert "a window of 1 of 4 tars mixes 0%" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere/*.tar"], "no shard found: looked for *.tar in nowhere"),
        (["nowhere-{0..2}.tar"], "3 of 3 shards do not exist: nowhere-0.tar"),
        (["TRAIN", "--against", "TRAIN/train-00001.tar"], "every image of it would be in both"),
        (["TRAIN", "--against", "nowhere.tar"], "1 of 1 shards do not exist: nowhere.tar"),
        (["TRAIN", "--batch", "10", "--ranks", "4"], "--batch 10 does not divide into --ranks 4; "
         "set --batch to 12, or change --ranks"),
        (["TRAIN", "--batch", "0"], "--batch is 0; set it to 1 or more"),
        (["TRAIN", "--ranks", "0"], "--ranks is 0; set it to 1 or more"),
        (["TRAIN", "--window", "0"], "--window is 0; set it to 1 or more"),
        (["TRAIN", "--view", "7"], "--view is 7; set it to 8 or more"),
        (["TRAIN", "--sample", "-1"], "--sample is -1; set it to 0 or more"),
        (["TRAIN", "--seed", "-1"], "--seed is -1; set it to 0 or more"),
    ],
)  # fmt: skip
def test_wrong_use_is_2_and_says_what_to_do(
    words: list[str], message: str, shards: Shards, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("TRAIN", str(shards.train)) for word in words]
    assert audit(*words) == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert captured.out == ""


def test_a_file_that_cannot_be_written(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(SystemExit) as ended:  # before anything is examined
        audit(shards.train, *QUICK, "--sample", "0", "--json", tmp_path / "taken" / "a")
    captured = capsys.readouterr()
    assert ended.value.code == 2 and captured.out == ""
    assert f"'{tmp_path / 'taken' / 'a'}' cannot be written" in " ".join(captured.err.split())


def test_the_door_of_the_folder_tools(cut: Path) -> None:
    ended = command(["tools/audit.py", "shards", cut, *QUICK, "--sample", "3"], cwd=ROOT)
    assert ended.code == 1, ended.err
    assert ended.out.startswith("not fit: 1 problem (1 damaged_tar)")
    assert ended.err == ""
    ended = command(["tools/audit.py", "shards", "--help"], cwd=ROOT)
    assert ended.code == 0
    assert "Exit code: 0 fit, 1 not fit, 2 wrong use" in ended.out
