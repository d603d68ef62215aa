"""The doctor of shards finds what is broken, names the place, and leaves the set as it was."""

import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from commands import Shards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import chi2_contingency

from mimkit.audit._shard_findings import REMEDIES, WARNINGS
from mimkit.audit._shard_labels import same_everywhere
from mimkit.audit._shard_shuffle import same_label
from mimkit.audit.shards import examine
from mimkit.audit.shards_report import ShardReport
from mimkit.batch import NO_LABEL
from mimkit.data.decode import decode_image
from mimkit.data.index import index_path, index_paths, load_index, save_index
from mimkit.data.sources.shards import ShardSource
from mimkit.data.tar import Member, scan_tar
from mimkit.data.writer import Item, write_manifest, write_shard
from mimkit.errors import UserError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
BLOCK = 512


def look(shards: Path | str | Sequence[str], cache: Path, **settings) -> ShardReport:
    given = shards if not isinstance(shards, Path) else str(shards)
    return examine(given, cache_dir=cache, **{"view": 48, "batch": 8, "window": 3} | settings)


def places(report: ShardReport) -> list[tuple[str, str, str, int | None]]:
    """Kind, name of the tar, key and offset of every problem."""
    return [(p.kind, Path(p.shard).name, p.key, p.offset) for p in report.problems]


def warned(report: ShardReport) -> dict[str, int]:
    """Count of each kind of warning."""
    counts = dict.fromkeys((warning.kind for warning in report.warnings), 0)
    for warning in report.warnings:
        counts[warning.kind] += warning.count
    return counts


def pack(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def encode(pixels: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def noise(seed: int, *, side: int = 48) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)


def png(seed: int, **size: int) -> bytes:
    return encode(noise(seed, **size), "PNG")


@pytest.fixture
def folder(shards: Shards, tmp_path: Path) -> Path:
    """A copy of 96 images in three tars, with manifest, classes and fresh indexes."""
    return Path(shutil.copytree(shards.train, tmp_path / "train"))


@pytest.fixture
def second(folder: Path) -> Path:
    """A tar to break, which the manifest says nothing about."""
    (folder / "manifest.json").unlink()
    return folder / "train-00001.tar"


def overwrite(path: Path, offset: int, content: bytes) -> None:
    changed = bytearray(path.read_bytes())
    changed[offset : offset + len(content)] = content
    path.write_bytes(changed)


def flip(path: Path, offset: int, *, bit: int = 0) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 1 << bit]))


def end_of(members: Sequence[Member]) -> int:
    """Where the end blocks begin."""
    return members[-1].offset + -(-members[-1].size // BLOCK) * BLOCK


def test_a_sound_set_is_fit_and_its_numbers_are_right(shards: Shards, tmp_path: Path) -> None:
    report = look(shards.train, tmp_path, against=str(shards.heldout), batch=10, ranks=2)
    assert report.fit and report.problems == report.warnings == ()
    assert (report.samples, report.decoded) == (96, 96)
    sizes = [path.stat().st_size for path in sorted(shards.train.glob("*.tar"))]
    assert [(tar.samples, tar.bytes) for tar in report.tars] == [(32, size) for size in sizes]
    assert {(tar.checksum, tar.index) for tar in report.tars} == {("ok", "ok")}
    epoch = report.epoch
    assert (epoch.updates, epoch.whole, epoch.left_over, epoch.per_rank) == (9.6, 9, 6, 5)
    images = report.images
    assert images.width == images.height == images.short_side
    assert (images.width.least, images.width.most) == (48, 48)
    assert images.megapixels.median == pytest.approx(48 * 48 / 1e6)
    assert (images.modes, images.formats) == ({"RGB": 96}, {"jpg": 96})
    members = [m for path in shards.train.glob("*.tar") for m in scan_tar(path)]
    assert images.bytes == sum(m.size for m in members if m.extension == "jpg")
    assert report.labels.counts == dict.fromkeys(range(4), 24)
    assert report.labels.most_share == (0.25, 0.25, 0.25)
    assert (report.against.samples, report.against.decoded, report.against.in_both) == (24, 24, 0)
    assert report.speed.decode > report.speed.views > 0
    assert report.speed.images == 96


def test_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    index_path(folder / "train-00000.tar").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert look(folder, tmp_path / "cache").tars[0].index == "none"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("where", "offset_of"),
    [
        ("in a header", lambda m, end: (m[4].offset - 200, m[4].offset - 200)),
        ("in the data", lambda m, end: (m[5].offset + 100, m[5].offset - BLOCK)),
        ("between members", lambda m, end: (m[4].offset - BLOCK, m[4].offset - BLOCK)),
        ("before the end blocks", lambda m, end: (end, end)),
        ("between the end blocks", lambda m, end: (end + BLOCK, end)),
    ],
)
def test_a_cut_tar_is_named_with_the_place(second: Path, tmp_path: Path, where, offset_of) -> None:
    members = scan_tar(second)
    cut, place = offset_of(members, end_of(members))
    second.write_bytes(second.read_bytes()[:cut])
    report = look(second.parent, tmp_path)
    assert places(report) == [("damaged_tar", "train-00001.tar", "", place)]
    assert not report.fit
    assert f"at byte {place}" in report.problems[0].detail
    assert "Fetch it again or write it again" in report.problems[0].detail
    assert [tar.samples for tar in report.tars] == [32, 0, 32], "the others were examined"
    assert (report.samples, report.decoded) == (64, 64)
    with pytest.raises(UserError):
        ShardSource(shards=str(second.parent), cache_dir=tmp_path)


@pytest.mark.parametrize(("blocks", "what"), [(1, "a hole at byte"), (3, "data after the end")])
def test_a_hole_over_a_header(second: Path, tmp_path: Path, blocks: int, what: str) -> None:
    header = scan_tar(second)[6].offset - BLOCK
    overwrite(second, header, bytes(BLOCK * blocks))
    report = look(second.parent, tmp_path)
    assert places(report) == [("damaged_tar", "train-00001.tar", "", header)]
    assert what in report.problems[0].detail


@pytest.mark.parametrize("number", [0, 5])
def test_a_flipped_bit_in_the_checksum_of_a_header(
    second: Path, tmp_path: Path, number: int
) -> None:
    header = scan_tar(second)[number].offset - BLOCK
    flip(second, header + 150)
    report = look(second.parent, tmp_path)
    assert places(report) == [("damaged_tar", "train-00001.tar", "", header)]
    assert "bad header checksum" in report.problems[0].detail


def test_a_flipped_bit_in_an_image_is_found_by_the_manifest(folder: Path, tmp_path: Path) -> None:
    tar = folder / "train-00002.tar"
    flip(tar, next(m.offset for m in scan_tar(tar) if m.extension == "jpg") + 700)
    report = look(folder, tmp_path, sample=0)
    assert places(report) == [("checksum_mismatch", "train-00002.tar", "", None)]
    assert [row.checksum for row in report.tars] == ["ok", "ok", "wrong"]
    assert "but manifest.json beside it says" in report.problems[0].detail
    assert report.samples == 96, "it is examined nevertheless"


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"", "not_a_tar"), (b"<html>" * 200, "not_a_tar"), (b"\x1f\x8b" + bytes(600), "not_a_tar")],
)
def test_other_files_called_tar(second: Path, tmp_path: Path, content: bytes, kind: str) -> None:
    second.write_bytes(content)
    assert places(look(second.parent, tmp_path)) == [(kind, "train-00001.tar", "", 0)]


def test_a_set_of_damaged_tars_only(second: Path, tmp_path: Path) -> None:
    second.write_bytes(second.read_bytes()[:1000])
    report = look(second, tmp_path)
    assert places(report) == [("damaged_tar", "train-00001.tar", "", 1000)]
    assert report.samples == report.epoch.whole == 0
    assert (report.images, report.labels, report.shuffle, report.speed) == (None,) * 4


def test_a_key_in_two_tars(folder: Path, tmp_path: Path, shards: Shards) -> None:
    member = scan_tar(folder / "train-00000.tar")[0]
    items = [Item(member.key, png(1), "png", 1), Item("other", png(2), "png", 1)]
    write_shard(folder / "train-00003.tar", items, split="train")
    report = look(folder, tmp_path)
    offset = next(m.offset for m in scan_tar(folder / "train-00003.tar") if m.extension == "png")
    assert places(report) == [("duplicate_key", "train-00003.tar", member.key, offset)]
    assert str(folder / "train-00000.tar") in report.problems[0].detail
    with pytest.raises(UserError, match="keys must be unique"):
        ShardSource(shards=str(folder), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("names", "key"), [(["a.png", "b.png", "a.png"], "a"), (["x.png", "x.PNG"], "x")]
)
def test_a_key_twice_in_a_tar(tmp_path: Path, names: list[str], key: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size = len(png(number))
            tar.addfile(member, io.BytesIO(png(number)))
    (problem,) = look(tmp_path / "a.tar", tmp_path).problems
    assert (problem.kind, problem.key) == ("duplicate_key", key)
    content = (tmp_path / "a.tar").read_bytes()
    assert content[problem.offset :].startswith(png(len(names) - 1)), "the second of the two"


def test_a_picture_twice_in_a_set_is_a_warning(tmp_path: Path) -> None:
    """By bytes; and by pixels, where it was encoded again without loss."""
    picture = encode(noise(0), "JPEG")
    again = encode(decode_image(picture), "PNG")
    pack(tmp_path / "a.tar", {
        "a.jpg": picture, "a.cls": b"1", "b.jpg": picture, "b.cls": b"1",
        "c.png": again, "c.cls": b"2", "d.png": png(1), "d.cls": b"2",
    })  # fmt: skip
    report = look(tmp_path / "a.tar", tmp_path)
    assert report.fit
    found = [w for w in report.warnings if w.kind == "duplicate_content"]
    assert [w.key for w in found] == ["b", "c"]
    assert "the same bytes as 'a'" in found[0].detail and "label" not in found[0].detail
    assert "the same pixels, in other bytes, as 'a'" in found[1].detail
    assert "has label 1; this has 2" in found[1].detail
    by_bytes = look(tmp_path / "a.tar", tmp_path, sample=0)
    assert warned(by_bytes)["duplicate_content"] == 1


def test_leaks_between_splits(folder: Path, tmp_path: Path, shards: Shards) -> None:
    source = ShardSource(shards=str(folder))
    bytes_of, pixels_of, key_of = (source[number] for number in (3, 40, 95))
    items = [
        Item("one", bytes_of.image, "jpg", 0),
        Item("two", encode(decode_image(pixels_of.image), "PNG"), "png", 1),
        Item(key_of.key, png(5), "png", 2),
        Item("new", png(6), "png", 3),
    ]
    other = tmp_path / "other.tar"
    write_shard(other, items, split="val")
    report = look(folder, tmp_path, against=str(other))
    assert places(report) == [
        ("leak_between_splits", "train-00000.tar", bytes_of.key, _offset(bytes_of.origin)),
        ("leak_between_splits", "train-00001.tar", pixels_of.key, _offset(pixels_of.origin)),
    ]
    same_bytes, same_pixels = (problem.detail for problem in report.problems)
    assert same_bytes.startswith(f"the same bytes as 'one' in {other} at byte ")
    assert same_pixels.startswith(f"the same pixels, in other bytes, as 'two' in {other} at byte ")
    assert report.against.in_both == 2
    assert warned(report) == {"key_in_both_splits": 1}
    reverse = look(other, tmp_path, against=str(folder))
    assert [problem.key for problem in reverse.problems] == ["one", "two"]


def _offset(origin: str) -> int:
    return int(origin.rpartition(" ")[2])


def test_what_is_wrong_with_the_other_split_counts_too(
    second: Path, tmp_path: Path, shards: Shards
) -> None:
    second.write_bytes(second.read_bytes()[:2000])
    (second.parent / "classes.json").write_text('["a", "b", "c", "d"]')
    report = look(shards.heldout, tmp_path, against=str(second.parent))
    assert [(p.kind, Path(p.shard).name) for p in report.problems] == [
        ("damaged_tar", "train-00001.tar"), ("classes_differ", "train")]  # fmt: skip
    assert (report.against.tars, report.against.samples) == (2, 64)


def test_labels(tmp_path: Path) -> None:
    """Missing, no number, outside classes.json; and with another count than the manifest's."""
    (tmp_path / "classes.json").write_text('["cat", "dog", "eel"]')
    (tmp_path / "manifest.json").write_text('{"classes": 4}')
    path = pack(tmp_path / "a.tar", {
        "a.png": png(0), "a.cls": b"0", "b.png": png(1), "c.cls": b"cat", "c.png": png(2),
        "d.png": png(3), "d.cls": b"3", "e.png": png(4), "e.json": b'{"label": 1}',
        "f.png": png(5), "f.cls": b"-1",
    })  # fmt: skip
    report = look(path, tmp_path)
    offset = {f"{m.key}.{m.extension}": m.offset for m in scan_tar(path)}
    assert places(report) == [
        ("bad_label", "a.tar", "c", offset["c.cls"]),
        ("label_missing", "a.tar", "b", offset["b.png"]),
        ("label_missing", "a.tar", "f", offset["f.png"]),
        ("label_out_of_range", "a.tar", "d", offset["d.png"]),
        ("class_count", tmp_path.name, "", None),
    ]
    assert [p.detail for p in report.problems[1:4]] == [
        "it has no label; 3 of 6 images have one",
        "it has no label; 3 of 6 images have one",
        "its label is 3, but classes.json names 0..2",
    ]
    assert "has 3 names, but manifest.json beside it says 4" in report.problems[4].detail
    assert report.labels.counts == {0: 1, 1: 1, 3: 1}
    (empty,) = (w for w in report.warnings if w.kind == "empty_class")
    assert (empty.key, empty.count) == ("eel", 1)


def test_what_is_written_beside_the_tars_and_cannot_be_read(tmp_path: Path) -> None:
    """Training would refuse it, or could not tell damage from what was written."""
    (tmp_path / "classes.json").write_text('["cat", "do')
    (tmp_path / "manifest.json").write_text('{"shards": [')
    path = pack(tmp_path / "a.tar", {"a.png": png(0), "a.cls": b"0"})
    report = look(path, tmp_path)
    assert places(report) == [
        ("bad_manifest", "manifest.json", "", None), ("bad_classes", "classes.json", "", None)
    ]  # fmt: skip
    assert "no JSON (Expecting value" in report.problems[0].detail
    assert "does not name the classes (Unterminated string" in report.problems[1].detail
    assert report.samples == 1 and report.labels is not None and not report.labels.names


def test_a_set_without_labels_is_fit(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.tar", {"a.png": png(0), "b.png": png(1)})
    report = look(path, tmp_path)
    assert report.fit
    assert report.labels is report.shuffle is None


def test_images_that_cannot_be_used(tmp_path: Path) -> None:
    jpeg = encode(noise(0), "JPEG")
    huge = Image.new("1", (30_000, 3_000))
    buffer = io.BytesIO()
    huge.save(buffer, "PNG")
    path = pack(tmp_path / "a.tar", {
        "cut.jpg": jpeg[: len(jpeg) // 2], "empty.jpg": b"", "gif.jpg": encode(noise(1), "GIF"),
        "huge.png": buffer.getvalue(), "sound.jpg": jpeg, "tiny.png": png(2, side=7),
    })  # fmt: skip
    report = look(path, tmp_path)
    assert [(p.kind, p.key, p.detail) for p in report.problems] == [
        ("undecodable", "cut", "Premature end of JPEG file"),
        ("undecodable", "empty", "empty, 0 bytes"),
        ("undecodable", "gif", "is a GIF; only JPEG, PNG and WebP are read"),
        ("image_size", "huge", "30000 x 3000 pixels; at most 89,478,485 in all are decoded"),
        ("image_size", "tiny", "7 x 7 pixels; no side should be shorter than 8"),
    ]
    assert [p.offset for p in report.problems] == [
        m.offset for m in scan_tar(path) if m.key != "sound"
    ]
    assert (report.samples, report.decoded, report.speed.images) == (6, 1, 1)
    without_decoding = look(path, tmp_path, sample=0)
    assert [p.key for p in without_decoding.problems] == ["empty", "gif", "huge", "tiny"]


def test_odd_images_are_warnings(tmp_path: Path) -> None:
    grey, cmyk = Image.fromarray(noise(0)).convert("L"), Image.fromarray(noise(1)).convert("CMYK")
    turned = Image.Exif()
    turned[0x0112] = 6
    contents = []
    for image, options in ((grey, {}), (cmyk, {}), (Image.fromarray(noise(2)), {"exif": turned})):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", **options)
        contents.append(buffer.getvalue())
    path = pack(tmp_path / "a.tar", {
        "a.jpg": contents[0], "b.jpg": contents[1], "c.jpeg": contents[2], "d.jpg": png(3),
        "e.png": png(4, side=40), "f.png": encode(np.full((48, 48, 3), 9, np.uint8), "PNG"),
    })  # fmt: skip
    report = look(path, tmp_path, view=48)
    assert report.fit
    assert {w.kind: (w.key, w.count) for w in report.warnings} == {
        "grey_image": ("a", 1), "cmyk_image": ("b", 1), "exif_orientation": ("c", 1),
        "wrong_extension": ("d", 1), "small_image": ("e", 1), "constant_image": ("f", 1),
    }  # fmt: skip
    assert report.images.modes == {"RGB": 4, "L": 1, "CMYK": 1}
    assert report.images.formats == {"jpg": 3, "png": 3}


def test_members_that_are_no_business_of_ours(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.tar", {
        "a.jpg": encode(noise(0), "JPEG"), "a.txt": b"cat", "a.pyd": b"cos\nsystem\n",
        "b.jpg": encode(noise(1), "JPEG"), "b.txt": b"dog", "c.txt": b"no image",
        "../d.png": png(2), "/etc/e.png": png(3), ".hidden": b"", "README": b"",
    })  # fmt: skip
    report = look(path, tmp_path)
    assert report.fit and report.samples == 4
    assert {(w.kind, w.key, w.count) for w in report.warnings} == {
        ("unread_member", "a.txt", 2), ("unread_member", ".hidden", 2),
        ("suspicious_file", "a.pyd", 1), ("sample_without_image", "c", 1),
        ("suspicious_name", "../d.png", 2),
    }  # fmt: skip


def test_links_are_problems_because_training_refuses_them(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        link = tarfile.TarInfo("a.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    report = look(tmp_path / "a.tar", tmp_path)
    assert places(report) == [("refused_member", "a.tar", "", 0)]
    with pytest.raises(UserError, match="symbolic link"):
        ShardSource(shards=str(tmp_path / "a.tar"), cache_dir=tmp_path)


def test_a_tar_without_images(tmp_path: Path) -> None:
    report = look(pack(tmp_path / "a.tar", {"a.txt": b"x"}), tmp_path)
    assert places(report) == [("no_image", "a.tar", "", None)]
    assert "found .txt" in report.problems[0].detail


@pytest.mark.parametrize("place", ["beside", "in the cache"])
def test_an_index_that_lies(folder: Path, tmp_path: Path, place: str) -> None:
    """Fresh by size and time, so that training would believe it."""
    tar, cache = folder / "train-00000.tar", tmp_path / "cache"
    index = load_index(tar, cache_dir=cache)
    index.offsets[7] += BLOCK
    if place == "beside":
        save_index(index, index_path(tar))
    else:
        index_path(tar).unlink()
        assert look(folder, cache).tars[0].index == "none"
        (cache / "index").mkdir(parents=True)
        save_index(index, index_paths(tar, cache_dir=cache)[1])
    report = look(folder, cache)
    true = int(index.offsets[7]) - BLOCK
    assert places(report) == [("wrong_index", tar.name, index.keys[7].decode(), true)]
    assert f"offsets[7] is {true + BLOCK}, in the tar {true}" in report.problems[0].detail
    assert [row.index for row in report.tars] == ["wrong", "ok", "ok"]


def test_indexes_that_will_be_made_again(folder: Path, tmp_path: Path) -> None:
    """One of another tar is a problem, one of another time is not, nor is a damaged one."""
    (folder / "manifest.json").unlink()
    first, second, third = sorted(folder.glob("*.tar"))
    os.utime(first, ns=(1, 1))
    index_path(second).write_bytes(b"PK\x03\x04 half an index")
    third.write_bytes(pack(folder / "new", {"a.png": png(0), "a.cls": b"1"}).read_bytes())
    report = look(folder, tmp_path)
    assert places(report) == [("stale_index", "train-00002.tar", "", None)]
    assert "it lists 32 samples, the tar holds 1" in report.problems[0].detail
    assert [row.index for row in report.tars] == ["old", "old", "wrong"]
    assert warned(report)["old_index"] == 2


@pytest.mark.parametrize("beside", [True, False])
def test_an_outdated_index_in_the_cache_is_no_trouble(
    folder: Path, tmp_path: Path, beside: bool
) -> None:
    """Of a tar that lay there before: training makes it again, or reads the one beside the tar."""
    first, second, _ = sorted(folder.glob("*.tar"))
    cached = index_paths(first, cache_dir=tmp_path)[1]
    cached.parent.mkdir()
    save_index(load_index(second, cache_dir=tmp_path), cached)
    if not beside:
        index_path(first).unlink()
    report = look(folder, tmp_path)
    assert report.fit and report.warnings == ()
    assert report.tars[0].index == ("ok" if beside else "none")


def test_what_the_manifest_says(folder: Path, tmp_path: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["samples"] = 31
    manifest["shards"].append({"shard": "train-00003.tar", "split": "train", "samples": 32})
    manifest["shards"].append({"shard": "val-00000.tar", "split": "val", "samples": 32})
    del manifest["shards"][1]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    report = look(folder, tmp_path)
    assert places(report) == [
        ("missing_shard", "train-00003.tar", "", None),
        ("count_mismatch", "train-00000.tar", "", None),
    ]
    assert warned(report) == {"not_in_manifest": 1}
    assert [row.checksum for row in report.tars] == ["ok", "none", "ok"]


@pytest.fixture(scope="module")
def by_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six tars of twenty images, each of one class."""
    folder = tmp_path_factory.mktemp("by_class")
    for number in range(6):
        items = [Item(f"{number}_{i}", png(20 * number + i, side=8), "png", number)
                 for i in range(20)]  # fmt: skip
        write_shard(folder / f"{number}.tar", items, split="train")
    return folder


def test_a_set_sorted_by_class_needs_a_larger_window(by_class: Path, tmp_path: Path) -> None:
    single = look(by_class, tmp_path, window=1, batch=10, view=8)
    assert single.fit
    assert (single.shuffle.same_label, single.shuffle.mixed) == (1.0, 0.0)
    assert single.shuffle.same_label_at_random == pytest.approx(6 * 20 * 19 / (120 * 119))
    assert single.labels.same_everywhere < 1e-100
    assert warned(single) == {"window_too_small": 1, "dominated_shard": 6}
    assert single.shuffle.sufficient_window == 6
    assert "data.window=6 suffices" in single.warnings[-1].detail
    full = look(by_class, tmp_path, window=6, batch=10, view=8)
    assert full.shuffle.mixed == pytest.approx(1, abs=0.02)
    assert warned(full) == {"dominated_shard": 6}
    half = look(by_class, tmp_path, window=3, batch=20, view=8).shuffle
    # every batch holds images of three tars: a pair is within one of them in 19 of 59 cases
    assert half.same_label == pytest.approx(19 / 59, abs=0.01)


def test_a_mixed_set_needs_no_window(shards: Shards, tmp_path: Path) -> None:
    shuffle = look(shards.train, tmp_path, window=1, batch=32).shuffle
    assert shuffle.same_label == shuffle.mixed * 0 + 7 / 31, "every batch is a tar: 8 of each class"
    assert shuffle.same_label_at_random == 23 / 95
    assert shuffle.sufficient_window == 1


@given(labels=st.lists(st.integers(-1, 4), min_size=2, max_size=40), batch=st.integers(2, 9))
def test_same_label_counts_pairs(labels: list[int], batch: int) -> None:
    batches = [labels[i : i + batch] for i in range(0, len(labels) - batch + 1, batch)]
    pairs = [b[i] == b[j] for b in batches for i in range(batch) for j in range(i)]
    expected = sum(pairs) / len(pairs) if pairs else 1.0
    assert same_label(np.array(labels), batch=batch) == pytest.approx(expected)


@given(table=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=2, max_size=5))
def test_p_value_is_scipys(table: list[list[int]]) -> None:
    count = np.array(table)
    tar_S, label_S = np.repeat(np.indices(count.shape).reshape(2, -1), count.ravel(), axis=1)
    count = count[count.any(1)][:, count.any(0)]
    found = same_everywhere(tar_S, label_S) if len(tar_S) else None
    if min(count.shape) < 2:
        assert found is None
    else:
        assert found == pytest.approx(chi2_contingency(count, correction=False).pvalue)


def test_a_sample_is_drawn_by_the_seed(shards: Shards, tmp_path: Path) -> None:
    report = look(shards.train, tmp_path, sample=5)
    assert report.fit and (report.decoded, report.samples, report.speed.images) == (5, 96, 5)
    assert look(shards.train, tmp_path, sample=1000).decoded == 96
    assert look(shards.train, tmp_path, sample=0).speed is None


def test_every_image_is_reported_to_the_progress_bar(shards: Shards, tmp_path: Path) -> None:
    calls = []
    look(shards.train, tmp_path, against=str(shards.heldout), sample=0,
         progress=lambda *call: calls.append(call))  # fmt: skip
    assert calls[:4] == [("tars", number, 4) for number in (1, 2, 3, 4)]
    assert calls[4:] == [("images", number, 120) for number in range(1, 121)]


def test_remedies_are_of_problems() -> None:
    assert not REMEDIES.keys() & WARNINGS


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small tars with a manifest; the second is the one to break."""
    folder = tmp_path_factory.mktemp("pair")
    records = [
        write_shard(folder / name, [Item(f"{name[0]}{i}", png(10 * number + i, side=8), "png", i)
                                    for i in range(3)], split="train")
        for number, name in enumerate(("a.tar", "b.tar"))
    ]  # fmt: skip
    write_manifest(folder, records, source="noise", classes=["x", "y", "z"], settings={})
    (folder / "whole").write_bytes((folder / "b.tar").read_bytes())
    return folder


def broken(pair: Path, content: bytes) -> Iterator[str]:
    """The kinds of problems when b.tar holds `content`; all of them are about it."""
    (pair / "b.tar").write_bytes(content)
    report = look(pair, pair / "cache", sample=0)
    assert not report.fit
    assert {Path(problem.shard).name for problem in report.problems} == {"b.tar"}
    return (problem.kind for problem in report.problems)


often = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100
)


@often
@given(data=st.data())
def test_every_truncation_is_a_problem_of_that_tar(pair: Path, data: st.DataObject) -> None:
    whole, members = (pair / "whole").read_bytes(), scan_tar(pair / "whole")
    cut = data.draw(st.integers(0, end_of(members) + 2 * BLOCK - 1))
    assert set(broken(pair, whole[:cut])) <= {"damaged_tar", "not_a_tar"}


@often
@given(data=st.data())
def test_every_flipped_bit_of_a_header_is_a_problem_of_that_tar(
    pair: Path, data: st.DataObject
) -> None:
    content, members = bytearray((pair / "whole").read_bytes()), scan_tar(pair / "whole")
    header = data.draw(st.sampled_from([member.offset - BLOCK for member in members]))
    bit = data.draw(st.integers(0, BLOCK * 8 - 1))
    content[header + bit // 8] ^= 1 << bit % 8
    kinds = set(broken(pair, bytes(content)))
    if kinds == {"checksum_mismatch"}:  # in the padding of the header's checksum, or 0 for blank
        assert bit // 8 in range(148, 156)
        assert scan_tar(pair / "b.tar") == members
    else:
        assert kinds <= {"damaged_tar", "not_a_tar"}


def test_flowers_have_two_images_in_two_splits(tmp_path: Path) -> None:
    """As their README says: a test image is also in train, and another in val."""
    flowers = SHARED / "flowers102-112"
    if not flowers.is_dir():
        pytest.skip("the shared data sets are not here")
    for packed in flowers.glob("*.tar.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    others = [str(tmp_path / "train-00000.tar"), str(tmp_path / "val-00000.tar")]
    report = look(f"{tmp_path}/test-*.tar", tmp_path, sample=0, against=others)
    assert {p.kind for p in report.problems} == {"leak_between_splits"}
    assert [p.key for p in report.problems] == ["image_07309", "image_08067"]
    assert ["train" in p.detail for p in report.problems] == [True, False]


def test_labels_are_what_training_reads(shards: Shards, tmp_path: Path) -> None:
    """The doctor numbers samples as the source does."""
    from mimkit.audit._shard_files import examine_tar
    from mimkit.audit._shard_samples import join

    source = ShardSource(shards=str(shards.train))
    tars = [examine_tar(path, cache_dir=tmp_path) for path in sorted(shards.train.glob("*.tar"))]
    samples = join(tars)
    assert [image.key for image in samples.images] == source.keys
    assert samples.labels.tolist() == source.labels.tolist() and NO_LABEL not in samples.labels
    assert samples.groups.tolist() == source.groups.tolist()
    assert all(samples.read(number) == source[number].image for number in (0, 31, 32, 95))
