"""Making shards: whole or not at all, continued, refused, listed."""

import csv
import errno
import gc
import json
import os
import shutil
import signal
import tarfile
from pathlib import Path

import pytest
import webdataset

from mimkit.batch import NO_LABEL
from mimkit.cli.make_shards import main
from mimkit.data import make_shards as module
from mimkit.data.image_folder import unique_keys
from mimkit.data.make_shards import make_shards
from mimkit.data.sources.shards import ShardSource
from mimkit.data.writer import Item, write_shard
from mimkit.errors import UserError
from mimkit.files import sha256


@pytest.fixture
def images(tmp_path: Path, jpegs: list[bytes]) -> Path:
    """Twenty in two classes, with names that need care."""
    root = tmp_path / "images"
    for i, jpeg in enumerate(jpegs):
        path = root / ("cat v1.0" if i % 2 else "dog") / f"pic.{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".npz"}


def test_a_folder_with_classes(images: Path, tmp_path: Path, jpegs: list[bytes]) -> None:
    ticks: list[tuple[int, int]] = []
    report = make_shards(
        images, tmp_path / "out", samples_per_shard=8, progress=lambda *tick: ticks.append(tick)
    )
    assert (report.num_samples, report.num_shards, report.failures) == (20, 3, [])
    assert ticks[0] == (0, 20) and ticks[-1] == (20, 20)
    source = ShardSource(shards=str(tmp_path / "out"))
    found = {source[i].key: source[i] for i in range(20)}
    assert sorted(s.image for s in found.values()) == sorted(jpegs)
    assert found["cat_v1_0/pic_1"].label == 0 and found["dog/pic_2"].label == 1
    assert source.labels.tolist() not in ([0] * 10 + [1] * 10, [1] * 10 + [0] * 10)  # mixed
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat v1.0", "dog"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["samples"] == {"train": 20}
    for entry in manifest["shards"]:
        shard = tmp_path / "out" / entry["shard"]
        assert entry["sha256"] == sha256(shard) and entry["bytes"] == shard.stat().st_size
        assert (tmp_path / "out" / (entry["shard"] + ".index.npz")).exists()
    assert not list(tmp_path.glob("out.partial*"))


def test_a_flat_folder_has_no_labels(images: Path, tmp_path: Path) -> None:
    make_shards(images / "dog", tmp_path / "out")
    source = ShardSource(shards=str(tmp_path / "out"))
    assert source.labels.tolist() == [NO_LABEL] * 10
    assert not (tmp_path / "out" / "classes.json").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # open files
def test_webdataset_reads_what_we_wrote(images: Path, tmp_path: Path) -> None:
    make_shards(images, tmp_path / "out", samples_per_shard=8)
    shards = sorted(str(path) for path in (tmp_path / "out").glob("*.tar"))
    dataset = webdataset.WebDataset(shards, shardshuffle=False)
    theirs = {s["__key__"]: (s["jpg"], int(s["cls"])) for s in dataset}
    del dataset
    gc.collect()
    source = ShardSource(shards=shards)
    ours = {source[i].key: (source[i].image, source[i].label) for i in range(len(source))}
    assert theirs == ours


def test_equal_input_gives_equal_bytes(images: Path, tmp_path: Path) -> None:
    make_shards(images, tmp_path / "a", samples_per_shard=8)
    make_shards(images, tmp_path / "b", samples_per_shard=8)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    with tarfile.open(tmp_path / "a" / "train-00000.tar") as tar:
        assert {(m.mtime, m.uid, m.gid) for m in tar.getmembers()} == {(0, 0, 0)}


def test_from_tars_with_doubles(tmp_path: Path, jpegs: list[bytes]) -> None:
    tars = tmp_path / "tars"
    tars.mkdir()
    for number in range(2):
        items = [Item(f"k{i}", jpegs[10 * number + i], "jpg", i) for i in range(10)]
        write_shard(tars / f"{number}.tar", items, split="train")
    (tars / "classes.json").write_text(json.dumps([f"class {i}" for i in range(10)]))
    make_shards(tars, tmp_path / "out")
    source = ShardSource(shards=str(tmp_path / "out"))
    samples = {source[i].key: source[i] for i in range(20)}
    assert samples["k3"].label == samples["k3_2"].label == 3
    assert sorted(s.image for s in samples.values()) == sorted(jpegs)
    assert json.loads((tmp_path / "out" / "classes.json").read_text())[9] == "class 9"


def test_unique_keys() -> None:
    names = ["a.1.jpg", "a_1.png", "a_1.jpg", "b.c/x y.jpg", "ü.jpg", "a_1_2"]
    assert unique_keys(names) == ["a_1", "a_1_2", "a_1_3", "b_c/x_y", "ü", "a_1_2_2"]


def spoil(images: Path, num: int, jpegs: list[bytes]) -> None:
    for i in range(0, 2 * num, 2):
        (images / "dog" / f"pic.{i}.jpg").write_bytes(jpegs[i][:-100])


def test_failures_are_listed(images: Path, tmp_path: Path, jpegs: list[bytes]) -> None:
    spoil(images, 1, jpegs)
    (images / "dog" / "link.jpg").symlink_to("nowhere")
    (images / "dog" / "old.gif").write_bytes(b"GIF89a...")
    report = make_shards(images, tmp_path / "out", samples_per_shard=8)
    assert report.num_samples == 19
    with (tmp_path / "out" / "failures.csv").open(newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"dog/pic_0", "dog/link", "dog/old"}
    assert "Premature end" in rows["dog/pic_0"]["cause"]
    assert rows["dog/pic_0"]["origin"] == str(images / "dog" / "pic.0.jpg")
    assert "No such file" in rows["dog/link"]["cause"]
    assert "is a GIF" in rows["dog/old"]["cause"]


def test_too_many_failures(images: Path, tmp_path: Path, jpegs: list[bytes]) -> None:
    spoil(images, 5, jpegs)
    with pytest.raises(UserError, match=r"allowed are 0 .*pic\.\d+\.jpg: Premature"):
        make_shards(images, tmp_path / "out", samples_per_shard=8, max_failures=0)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="interrupted make_shards"):
        ShardSource(shards=str(tmp_path / "out.partial"))
    assert (tmp_path / "out.partial" / "failures.csv").exists()
    report = make_shards(images, tmp_path / "out", samples_per_shard=8, max_failures=0.5)
    assert report.num_samples == 15 and len(report.failures) == 5


def test_the_refused_command_is_refused_again(
    images: Path, tmp_path: Path, jpegs: list[bytes]
) -> None:
    """Also where nothing is left to write: the bad images are in the last shard, the only one."""
    spoil(images, 5, jpegs)
    for _ in range(2):
        with pytest.raises(UserError, match="5 of the first 20 images"):
            make_shards(images, tmp_path / "out", samples_per_shard=100, max_failures=0)
    assert not (tmp_path / "out").exists()


def test_nothing_but_failures(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="empty, 0 bytes"):
        make_shards(tmp_path / "images", tmp_path / "out", max_failures=1)


def test_an_interrupted_run_goes_on(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(images, tmp_path / "whole", samples_per_shard=8)
    out, partial, decoded = tmp_path / "out", tmp_path / "out.partial", 0
    decode = module.decode_image

    def interrupt(encoded: bytes) -> object:
        nonlocal decoded
        decoded += 1
        if decoded == 12:
            raise KeyboardInterrupt
        return decode(encoded)

    monkeypatch.setattr(module, "decode_image", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_shards(images, out, samples_per_shard=8)
    assert not out.exists()
    assert sorted(p.name for p in partial.iterdir()) == [
        "train-00000.tar",
        "train-00000.tar.index.npz",
        "unfinished.json",
    ]
    with pytest.raises(UserError, match=r"other settings: samples_per_shard 8, now 5"):
        make_shards(images, out, samples_per_shard=5)
    make_shards(images, out, samples_per_shard=8)
    assert decoded == 12 + 13  # the first shard of 7 was not decoded again
    assert contents(out) == contents(tmp_path / "whole")
    assert not partial.exists()


def test_a_killed_run_goes_on(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(images, tmp_path / "whole", samples_per_shard=8)
    child = os.fork()
    if not child:
        decoded = iter(range(11))  # one shard of seven, and four of the next
        monkeypatch.setattr(
            module,
            "decode_image",
            lambda _: None if next(decoded) < 10 else os.kill(os.getpid(), signal.SIGKILL),
        )
        make_shards(images, tmp_path / "out", samples_per_shard=8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = [path.name for path in (tmp_path / "out.partial").iterdir()]
    assert len([name for name in left if name.endswith(".tmp")]) == 1
    make_shards(images, tmp_path / "out", samples_per_shard=8)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_complete_one_is_left_alone(images: Path, tmp_path: Path) -> None:
    make_shards(images, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "unfinished.json").write_text("{}")  # killed right before the end
    report = make_shards(images, tmp_path / "out")
    assert report.was_complete and report.num_samples == 20
    assert contents(tmp_path / "out") == before
    (images / "dog" / "pic.0.jpg").unlink()
    with pytest.raises(UserError, match="another source or with other settings: source_digest"):
        make_shards(images, tmp_path / "out")


def test_out_of_something_else(images: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"was not written by make_shards \(found: thesis.tex\)"):
        make_shards(images, tmp_path / "out")
    with pytest.raises(UserError, match="was not written by make_shards"):
        make_shards(images, tmp_path / "out" / "thesis.tex")
    (tmp_path / "empty").mkdir()
    assert make_shards(images, tmp_path / "empty").num_samples == 20


@pytest.mark.parametrize("full_after", [0, 1])
def test_a_full_disk(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_after: int
) -> None:
    add, written = tarfile.TarFile.addfile, 0

    def addfile(self: tarfile.TarFile, *args: object) -> None:
        nonlocal written
        written += 1
        if written > 14 * full_after + 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, *args)

    monkeypatch.setattr(tarfile.TarFile, "addfile", addfile)
    with pytest.raises(UserError, match="No space left"):
        make_shards(images, tmp_path / "out", samples_per_shard=8)
    assert not (tmp_path / "out").exists()
    left = sorted(path.name for path in (tmp_path / "out.partial").glob("*.tar*"))
    assert left == ["train-00000.tar", "train-00000.tar.index.npz"][: 2 * full_after]
    assert (tmp_path / "out.partial").exists() == bool(full_after)


def test_the_command(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(images), str(tmp_path / "out"), "--samples-per-shard", "8"]) == 0
    assert "has 20 samples in 3 shards" in capsys.readouterr().out
    assert main([str(images), str(tmp_path / "out"), "--samples-per-shard", "8"]) == 0
    assert "holds already 20 samples" in capsys.readouterr().out
    shutil.rmtree(images)
    with pytest.raises(UserError, match=f"there is no {images}; give a folder of images, or tars"):
        main([str(images), str(tmp_path / "other")])
