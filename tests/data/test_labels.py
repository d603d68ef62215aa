"""Labels come with the index: from `.cls`, from a record in `.json`, or there are none."""

import json
from pathlib import Path

import pytest
import webdataset

from mimkit.batch import NO_LABEL
from mimkit.data.index import load_index, make_index
from mimkit.data.sources.folder import FolderSource
from mimkit.data.sources.shards import ShardSource
from mimkit.errors import UserError

# What img2dataset writes for an image, with a column `label` that was kept.
IMG2DATASET = {
    "url": "https://example.org/1.jpg", "caption": "a cat", "key": "000000001", "status": "success",
    "error_message": None, "width": 60, "height": 50, "original_width": 60, "original_height": 50,
    "exif": "{}", "sha256": "00",
}  # fmt: skip
# What timm's ImageNet shards say of one.
TIMM = {"label": 7, "width": 60, "height": 50, "filename": "n01440764_10026.JPEG"}


def label(tmp_path: Path, jpeg: bytes, **members: object) -> int:
    """Of one sample with these members beside its image, written by webdataset."""
    path = tmp_path / "a.tar"
    with webdataset.TarWriter(str(path)) as tar:
        tar.write({"__key__": "some/key", "jpg": jpeg, **members})
    index = make_index(path)
    assert len(index) == 1
    return int(index.labels[0])


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({**IMG2DATASET, "label": 3}, 3),
        (TIMM, 7),
        ({"cls": 4}, 4),
        ({"class": 5}, 5),
        ({"class": 1, "cls": 2, "label": 3}, 3),
        ({"class": 1, "cls": 2}, 2),
        ({"label": "cat", "class": 6}, 6),
        ({"label": 0}, 0),
        ({"label": -1}, NO_LABEL),
        (IMG2DATASET, NO_LABEL),
        ({"label": "cat"}, NO_LABEL),
        ({"label": None}, NO_LABEL),
        ({"label": True}, NO_LABEL),
        ({"label": [3]}, NO_LABEL),
        ({"caption": {"label": 3}}, NO_LABEL),
        ([{"label": 3}], NO_LABEL),
        (3, NO_LABEL),
    ],
)
def test_a_record(record: object, expected: int, tmp_path: Path, jpegs: list[bytes]) -> None:
    assert label(tmp_path, jpegs[0], json=json.dumps(record).encode()) == expected


def test_cls_comes_before_a_record(tmp_path: Path, jpegs: list[bytes]) -> None:
    assert label(tmp_path, jpegs[0], json=b'{"label": 3}', cls=b" 8\n") == 8
    assert label(tmp_path, jpegs[0], json=b"no JSON at all", cls=b"8") == 8
    assert label(tmp_path, jpegs[0], cls=b"-1") == NO_LABEL
    assert label(tmp_path, jpegs[0], txt=b"3") == NO_LABEL


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"json": b'{"label": 3'}, r"key\.json' is no JSON \(Expecting"),
        ({"json": b"\xff\xfe{}\x80"}, r"key\.json' is no JSON \('utf"),
        ({"json": b"[" * 100_000}, r"key\.json' is no JSON \(maximum recursion"),
        ({"json": b'{"label": ' + b"9" * 5000 + b"}"}, r"key\.json' is no JSON \(Exceeds"),
        ({"json": b'{"label": 3.0}'}, r"key\.json' is 3\.0; expected an integer from 0 to"),
        ({"json": b'{"label": NaN}'}, r"key\.json' is nan; expected an integer from 0 to"),
        ({"json": b'{"label": -2}'}, r"key\.json' is -2; expected"),
        ({"json": b'{"label": 2147483648}'}, r"key\.json' is 2147483648; expected"),
        ({"json": b'{"label": 3}' + b" " * (1 << 20)}, r"key\.json' has 1048588 bytes; at most"),
        ({"cls": b"99999999999999999999"}, r"key\.cls' is 99999999999999999999; expected"),
        ({"cls": b"cat"}, r"key\.cls' is b'cat'; expected an integer in ASCII"),
        ({"cls": b"1" * 65}, r"key\.cls' has 65 bytes; at most 64"),
        ({"cls": b""}, r"key\.cls' is b''"),
    ],
)
def test_what_is_no_label_names_shard_and_key(
    members: dict[str, bytes], message: str, tmp_path: Path, jpegs: list[bytes]
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        label(tmp_path, jpegs[0], **members)
    assert str(caught.value).startswith(f"{tmp_path / 'a.tar'}: the label in 'some/key.")


def test_labels_are_kept_in_the_index(tmp_path: Path, jpegs: list[bytes]) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as tar:
        for i in range(3):
            tar.write({"__key__": f"k{i}", "jpg": jpegs[i], "json": {"class": 10 + i}})
    load_index(tmp_path / "a.tar", cache_dir=tmp_path)
    source = ShardSource(shards=str(tmp_path / "a.tar"))
    assert source.labels.tolist() == [10, 11, 12]
    assert [source[i].label for i in range(3)] == [10, 11, 12]


def test_folder_names_are_labels(tmp_path: Path, jpegs: list[bytes]) -> None:
    for name in ("b/1.jpg", "a/1.jpg", "c/2.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(jpegs[0])
    source = FolderSource(folder=tmp_path)
    assert source.classes == ["a", "b", "c"]
    assert dict(zip(source.keys, source.labels.tolist(), strict=True)) == {
        "a/1": 0, "b/1": 1, "c/2": 2,
    }  # fmt: skip
