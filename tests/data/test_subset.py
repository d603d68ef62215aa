"""A subset by fraction, by classes, by list; and a part that is held out by the hash of its key."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimkit.batch import NO_LABEL, Sample
from mimkit.build import build_data
from mimkit.config import DataConfig, LabelledDataConfig
from mimkit.data._shares import divide
from mimkit.data.mixture import Ingredient, MixtureSource
from mimkit.data.selection import split_heldout, take, take_few, take_fraction, take_listed
from mimkit.data.sources import Source
from mimkit.data.sources.shards import ShardSource
from mimkit.data.subset import SubsetSource
from mimkit.data.writer import Item, write_shard
from mimkit.errors import UserError


class Keys(Source):
    """Samples of which only key and label matter."""

    def __init__(self, keys: list[str], labels: list[int] | None = None, name: str = "") -> None:
        self._keys, self._name = keys, name
        self._labels = np.array(labels or [NO_LABEL] * len(keys))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Sample:
        return Sample(index, self._keys[index], b"", int(self._labels[index]), self._name)

    @property
    def digest(self) -> str:
        return f"{self._name}{self._keys}"

    @property
    def keys(self) -> list[str]:
        return self._keys

    @property
    def labels(self) -> np.ndarray:
        return self._labels


MANY = [f"n{i:05d}" for i in range(3000)]
CLASSES = [min(int(i / 3), 7 + i % 3) for i in range(3000)]  # 7 of three images, 3 of about 990


def fraction(source: Source, share: float, *, stratified: bool = False, seed: int = 0) -> Source:
    return take_fraction(source, fraction=share, stratified=stratified, seed=seed)


def test_a_subset_is_some_samples_in_their_order(shard_folder: Path, jpegs: list[bytes]) -> None:
    parent = ShardSource(shards=str(shard_folder))  # 7, 5 and 8 samples
    subset = SubsetSource(parent, [19, 3, 4, 6, 13])
    assert len(subset) == 5
    assert subset.keys == [f"cat/{i:03d}" for i in (3, 4, 6, 13, 19)]
    assert subset.labels.tolist() == [3, 4, 6, 13, 19]
    assert subset.groups.tolist() == [0, 3, 5]  # nothing of the second shard
    sample = subset[3]
    assert (sample.index, sample.key, sample.label) == (3, "cat/013", 13)
    assert sample.image == jpegs[13] and sample.origin == parent[13].origin
    again = SubsetSource(subset, [1, 4])
    assert again.keys == ["cat/004", "cat/019"]
    assert again.groups.tolist() == [0, 1, 2]


def test_the_digest_binds_the_samples_and_the_choice() -> None:
    digests = {
        SubsetSource(Keys(["a", "b", "c"], name=name), numbers).digest
        for name in ("one", "other")
        for numbers in ([0, 1], [0, 2], [0, 1, 2])
    }
    assert len(digests) == 6
    parent = Keys(["a", "b", "c"])
    assert SubsetSource(parent, [1, 0]).digest == SubsetSource(parent, [0, 1, 1]).digest
    assert SubsetSource(parent, [0, 1, 2]).digest != parent.digest


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 1 / 3, 0.5, 1.0])
def test_a_fraction_has_an_exact_number(share: float) -> None:
    assert len(fraction(Keys(MANY), share)) == round(3000 * share)


def test_a_smaller_fraction_is_a_part_of_a_larger_one() -> None:
    chosen = [set(fraction(Keys(MANY), share).keys) for share in (0.01, 0.1, 0.11, 0.6)]
    assert chosen[0] < chosen[1] < chosen[2] < chosen[3]


def test_a_fraction_depends_on_keys_and_its_seed_only() -> None:
    chosen = set(fraction(Keys(MANY), 0.1).keys)
    reordered = [MANY[i] for i in np.random.default_rng(0).permutation(3000)]
    assert set(fraction(Keys(reordered, name="other"), 0.1).keys) == chosen
    other = set(fraction(Keys(MANY), 0.1, seed=1).keys)
    assert len(other) == 300 and 10 < len(other & chosen) < 60  # 30 by chance
    front = sum(key < "n01500" for key in chosen)
    assert 110 < front < 190  # from everywhere


def test_these_choices_are_for_ever() -> None:
    assert fraction(Keys(MANY[:200]), 0.02).keys == ["n00004", "n00034", "n00120", "n00178"]
    assert fraction(Keys(MANY[:200]), 0.02, seed=2**63 - 1).keys == [
        "n00037",
        "n00098",
        "n00100",
        "n00167",
    ]
    assert split_heldout(Keys(MANY[:200]), fraction=0.02)[1].keys == [
        "n00004",
        "n00041",
        "n00103",
        "n00105",
        "n00166",
    ]


@pytest.mark.parametrize("share", [0.002, 0.05, 0.35, 1.0])
def test_stratified_every_class_has_its_share(share: float) -> None:
    source = Keys(MANY, CLASSES)
    sizes, subset = Counter(CLASSES), fraction(source, share, stratified=True)
    counts = Counter(subset.labels.tolist())
    assert len(subset) == round(3000 * share)
    for label, size in sizes.items():
        assert abs(counts[label] - share * size) < 1
    # by largest remainders, as by hand
    labels = sorted(sizes)
    assert [counts[label] for label in labels] == divide(
        round(3000 * share), [sizes[label] for label in labels]
    ).tolist()


def test_a_stratified_fraction_misses_a_larger_one_by_an_image_a_class_at_most() -> None:
    source = Keys(MANY, CLASSES)
    shares = [0.003, 0.01, 0.0101, 0.02, 0.1, 0.5, 0.9]
    chosen = [fraction(source, share, stratified=True) for share in shares]
    for smaller, larger in pairwise(chosen):
        missing = set(smaller.keys) - set(larger.keys)
        labels = Counter(CLASSES[MANY.index(key)] for key in missing)
        assert all(count <= 1 for count in labels.values())


def test_within_a_class_the_smallest_hashes_are_taken() -> None:
    """As without classes: one class alone gives the same images both ways."""
    source = Keys(MANY, [5] * 3000)
    assert fraction(source, 0.1, stratified=True).keys == fraction(source, 0.1).keys


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.floats(0, 1))
def test_shares_add_up(sizes: list[int], share: float) -> None:
    total = round(share * sum(sizes))
    counts = divide(total, sizes)
    assert counts.sum() == total
    for count, size in zip(counts, sizes, strict=True):
        exact = total * size / sum(sizes)
        assert np.floor(exact - 1e-9) <= count <= min(size, np.ceil(exact + 1e-9))


def test_shares_by_largest_remainders() -> None:
    assert divide(10, [53, 24, 23]).tolist() == [5, 3, 2]  # 5.3, 2.4, 2.3
    assert divide(2, [5, 5, 5]).tolist() == [1, 1, 0]


def test_every_set_of_a_mixture_gives_its_share() -> None:
    """And the same images as alone; weights stay."""
    one, other = Keys(MANY[:100]), Keys(MANY[1000:1400])
    mixture = MixtureSource([Ingredient("one", one, 3.0), Ingredient("other", other)])
    subset = fraction(mixture, 0.1)
    assert subset.sets == [(0, 10, 3.0), (10, 50, 1.0)]
    assert subset.epoch_length == 70
    assert subset.keys == fraction(one, 0.1).keys + fraction(other, 0.1).keys


def test_a_fraction_that_is_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.subset=0\.001 of the 200 samples of a set is none"):
        fraction(Keys(MANY[:200]), 0.001)
    mixture = MixtureSource([Ingredient("one", Keys(MANY)), Ingredient("two", Keys(["a", "b"]))])
    with pytest.raises(UserError, match=r"data\.subset=0\.01 of the 2 samples of a set"):
        fraction(mixture, 0.01)


def test_stratified_needs_labels() -> None:
    labels = [0] * 2990 + [NO_LABEL] * 10
    with pytest.raises(UserError, match=r"data\.stratified=true .* 10 of 3000 .* have none"):
        fraction(Keys(MANY, labels), 0.1, stratified=True)
    assert len(fraction(Keys(MANY, labels), 0.1)) == 300


def listed(tmp_path: Path, text: str, source: Source | None = None) -> Source:
    (tmp_path / "keys.txt").write_text(text, encoding="utf-8")
    return take_listed(source or Keys(MANY), tmp_path / "keys.txt")


def test_a_list(tmp_path: Path) -> None:
    subset = listed(tmp_path, "\ufeffn00007\r\n\nn00002 \nn02999")
    assert subset.keys == ["n00002", "n00007", "n02999"]  # not in the order of the list
    assert subset.digest == SubsetSource(Keys(MANY), [2, 7, 2999]).digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n00001\nn9\nn8\n", r"2 of its 3 keys are not trained on: 'n9', 'n8'\. Keys .* 'n00000'"),
        ("n00001\nn00002\nn00001\n", r"names keys more than once: 'n00001'"),
        ("\n\n", "holds no key"),
        ("\n".join(f"x{i}" for i in range(9)), r"'x0', 'x1', 'x2', 'x3', 'x4' and 4 more"),
    ],
)
def test_a_list_that_does_not_fit(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        listed(tmp_path, text)
    assert f"data.subset={tmp_path / 'keys.txt'}" in str(caught.value)


def test_a_list_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, reason in (
        (tmp_path / "nowhere", "No such file"),
        (tmp_path / "binary", "not UTF-8"),
    ):
        with pytest.raises(UserError, match=reason):
            take_listed(Keys(MANY), path)


def test_a_key_that_two_sets_share_cannot_be_listed(tmp_path: Path) -> None:
    mixture = MixtureSource([Ingredient(n, Keys(["a", "b", n])) for n in ("one", "two")])
    assert listed(tmp_path, "one\ntwo", mixture).keys == ["one", "two"]
    with pytest.raises(UserError, match=r"samples of several sets .* same key: 'a'"):
        listed(tmp_path, "a\none", mixture)


def test_all_is_all() -> None:
    source = Keys(MANY)
    assert take(source, None) is source


def test_held_out_and_the_others_are_all_and_apart() -> None:
    train, heldout = split_heldout(Keys(MANY), fraction=0.1)
    assert sorted([*train.keys, *heldout.keys]) == MANY
    assert 250 < len(heldout) < 350


def test_a_sample_stays_held_out_whatever_is_added() -> None:
    few, many = (split_heldout(Keys(keys), fraction=0.1) for keys in (MANY[500:1500], MANY[::-1]))
    assert set(few[0].keys) < set(many[0].keys)
    assert set(few[1].keys) < set(many[1].keys)
    more = split_heldout(Keys(MANY), fraction=0.15)[1]
    assert set(many[1].keys) < set(more.keys)


def test_held_out_is_not_chosen_as_a_subset_is() -> None:
    """Else a subset would hold no key, or all, of what is held out at another fraction."""
    heldout = set(split_heldout(Keys(MANY), fraction=0.1)[1].keys)
    subset = set(fraction(Keys(MANY), 0.1).keys)
    assert 10 < len(heldout & subset) < 60


def test_a_few_are_from_everywhere_and_part_of_more() -> None:
    """Of sorted shards the first hundred would be of one class."""
    source = Keys(MANY, [i // 300 for i in range(3000)])
    few, more = take_few(source, 100), take_few(Keys(MANY[::-1]), 200)
    assert len(few) == 100 and few.keys == sorted(few.keys)
    assert set(few.keys) < set(more.keys)
    assert max(Counter(few.labels.tolist()).values()) < 25 and len(set(few.labels.tolist())) == 10
    assert take_few(source, 3000) is source
    chosen, heldout = set(more.keys), set(split_heldout(source, fraction=1 / 15)[1].keys)
    assert len(chosen & heldout) < 40  # 13 by chance


@pytest.mark.parametrize(("share", "what"), [(1e-9, "judge by"), (1 - 1e-9, "train on")])
def test_nothing_held_out_or_everything(share: float, what: str) -> None:
    with pytest.raises(UserError, match=f"leaves nothing to {what}"):
        split_heldout(Keys(MANY[:50]), fraction=share)


@pytest.fixture
def settings(shard_folder: Path) -> dict[str, object]:
    return {"train": str(shard_folder), "cache_dir": str(shard_folder)}


def test_settings_choose_what_is_trained_on(settings: dict[str, object], tmp_path: Path) -> None:
    labelled = LabelledDataConfig(**settings, heldout=settings["train"], heldout_limit=6)
    judged = build_data(labelled)[1]
    assert judged is not None and judged.keys == take_few(build_data(labelled)[0], 6).keys
    whole, nothing = build_data(DataConfig(**settings, heldout=None))
    assert (len(whole), nothing) == (20, None)
    train, heldout = build_data(DataConfig(**settings, heldout_fraction=0.3))
    assert heldout is not None
    assert sorted([*train.keys, *heldout.keys]) == whole.keys
    part, same = build_data(DataConfig(**settings, heldout_fraction=0.3, subset=0.5))
    assert same is not None and same.digest == heldout.digest
    assert len(part) == round(len(train) / 2) and set(part.keys) < set(train.keys)
    other, _ = build_data(DataConfig(**settings, heldout_fraction=0.3, subset=0.5, subset_seed=1))
    assert len({s.digest for s in (whole, train, heldout, part, other)}) == 5


def test_what_is_held_out_cannot_be_listed(settings: dict[str, object], tmp_path: Path) -> None:
    _, heldout = build_data(DataConfig(**settings, heldout_fraction=0.3))
    assert heldout is not None
    (tmp_path / "keys.txt").write_text(heldout.keys[0])
    subset = str(tmp_path / "keys.txt")
    with pytest.raises(UserError, match=r"1 of them are held out by data\.heldout_fraction"):
        build_data(DataConfig(**settings, heldout_fraction=0.3, subset=subset))
    assert len(build_data(DataConfig(**settings, heldout=None, subset=subset))[0]) == 1


def test_more_shards_move_nothing_across(
    settings: dict[str, object], shard_folder: Path, jpegs: list[bytes]
) -> None:
    before = build_data(DataConfig(**settings, heldout_fraction=0.3))
    items = [Item(f"dog/{i:03d}", jpegs[i], "jpg", i) for i in range(20)]
    write_shard(shard_folder / "train-00009.tar", items, split="train")
    after = build_data(DataConfig(**settings, heldout_fraction=0.3))
    for old, new in zip(before, after, strict=True):
        assert old is not None and new is not None
        assert set(old.keys) == {key for key in new.keys if key.startswith("cat/")}
