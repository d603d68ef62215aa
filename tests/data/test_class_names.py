"""Names of classes: every form that says one thing is read, and every other is refused by name."""

import json
from pathlib import Path

import pytest
from commands import Shards

from mimkit.class_names import class_names, names_on_record
from mimkit.data.class_labels import agreed_classes, notes_on_classes
from mimkit.data.index import load_index
from mimkit.data.manifest import read_classes
from mimkit.data.sources.shards import ShardSource
from mimkit.data.subset import SubsetSource
from mimkit.data.writer import Item, write_shard
from mimkit.errors import UserError

PAIRS = [["n01440764", "tench"], ["n02102040", "English springer"]]
NAMED = ["n01440764 tench", "n02102040 English springer"]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["b", "a"], ["b", "a"]),
        (PAIRS, NAMED),
        ({"1": "a", "0": "b"}, ["b", "a"]),
        ({"0": PAIRS[0], "1": PAIRS[1]}, NAMED),  # as ImageNet's class index
        ({"a": 1, "b": 0}, ["b", "a"]),  # as torchvision's class_to_idx
        ({"0": 0, "1": 1, "10": 2}, ["0", "1", "10"]),  # folders that are called by numbers
        ({"0": "1", "1": "0"}, ["1", "0"]),
        ({str(number): f"c{number}" for number in range(11)}, [f"c{n}" for n in range(11)]),
    ],
)
def test_forms_that_say_one_thing(found: object, expected: list[str], tmp_path: Path) -> None:
    assert class_names(found) == expected
    (tmp_path / "classes.json").write_text(json.dumps(found), encoding="utf-8-sig")
    assert read_classes(tmp_path) == expected


BAD = {
    "cut off": ('["cat", "do', "Unterminated string"),
    "bytes of something else": ("\x00PNG", "Expecting value"),
    "numbers": ("[0, 1]", "entry 0 is 0"),
    "labels in pairs": ('[[0, "cat"], [1, "dog"]]', r"entry 0 is \[0, 'cat'\]"),
    "triples": ('["cat", ["a", "b", "c"]]', "entry 1 is"),
    "nothing": ("[]", "it is empty"),
    "null": ("null", "one NoneType"),
    "a gap": ('{"0": "cat", "2": "dog"}', r"its 2 names are not numbered 0\.\.1"),
    "a label twice": ('{"cat": 0, "dog": 0}', r"not numbered 0\.\.1, each once"),
    "both ways": ('{"cat": 0, "1": "dog"}', r"not numbered 0\.\.1"),
    "true and false": ('{"cat": true, "dog": false}', "not numbered"),
    "a record": ('{"classes": ["cat", "dog"]}', r"its 1 names are not numbered 0\.\.0"),
}


@pytest.mark.parametrize("what", BAD)
def test_others_are_refused_with_the_file_and_what_is_expected(what: str, tmp_path: Path) -> None:
    content, message = BAD[what]
    (tmp_path / "classes.json").write_text(content)
    with pytest.raises(UserError, match=message) as refused:
        read_classes(tmp_path)
    said = str(refused.value)
    assert said.startswith(f"{tmp_path / 'classes.json'} does not name the classes")
    assert "a list of strings or of [id, name] pairs" in said


def test_none_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    assert read_classes(tmp_path) == read_classes(tmp_path / "nothing") == []
    (tmp_path / "classes.json").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*classes\.json \(Is a directory\)"):
        read_classes(tmp_path)


def test_a_manifest_that_is_cut_off_is_no_missing_one(
    tmp_path: Path, shards: Shards
) -> None:  # else a damaged shard would pass
    image = ShardSource(shards=str(shards.heldout))[0].image
    write_shard(tmp_path / "x-00000.tar", [Item("a", image, "jpg", 0)], split="x")
    (tmp_path / "x-00000.tar.index.npz").unlink(missing_ok=True)
    (tmp_path / "manifest.json").write_text('{"shards": [{"sha')
    with pytest.raises(UserError, match=r"manifest\.json is no JSON .* write it again"):
        load_index(tmp_path / "x-00000.tar", cache_dir=tmp_path)


def test_older_files_of_ours_mean_the_same() -> None:
    assert names_on_record([str(pair) for pair in PAIRS]) == tuple(NAMED)
    odd = ("[x]", "[1, 2]", "cat", "['a', 'b', 'c']")
    assert names_on_record(odd) == odd


def test_notes_say_what_could_not_be_compared_and_what_cannot_be_learnt(shards: Shards) -> None:
    train, heldout = (ShardSource(shards=str(folder)) for folder in (shards.train, shards.heldout))
    both = {"data.train": train, "data.heldout": heldout}
    classes = agreed_classes(both, stated=None)
    assert notes_on_classes(both, classes) == []

    class Unnamed(SubsetSource):
        @property
        def classes(self) -> list[str]:
            return []

    nameless = {**both, "data.heldout": Unnamed(heldout, range(len(heldout)))}
    [note] = notes_on_classes(nameless, agreed_classes(nameless, stated=None))
    assert note.startswith("data.heldout names no classes") and "numbers of the labels" in note
    alone = {"data.train": Unnamed(train, range(len(train)))}
    assert notes_on_classes(alone, agreed_classes(alone, stated=None)) == []

    one = {
        **both,
        "data.train": SubsetSource(train, [i for i in range(96) if train.labels[i] == 2]),
    }
    [note] = notes_on_classes(one, agreed_classes(one, stated=None))
    others = ", ".join(classes.names[n] for n in (0, 1, 3))
    assert note == f"3 of 4 classes have no image in data.train, and cannot be learnt: {others}"
