"""Several sets as one source: numbers, weights, labels, and what a configuration makes of them."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from test_loader import VIEWS, fingerprints, hashes, mask, stream

from mimkit.batch import NO_LABEL
from mimkit.build import build_data, check_splits
from mimkit.config import DataConfig
from mimkit.data.loader import eval_loader
from mimkit.data.mixture import Ingredient, MixtureSource, check_weights
from mimkit.data.sampler import first_samples
from mimkit.data.sources.shards import ShardSource
from mimkit.data.writer import Item, write_shard
from mimkit.errors import UserError
from mimkit.random import Purpose, generator

Sets = list[dict[str, object]]


def shard(shard_folder: Path, number: int) -> ShardSource:
    return ShardSource(shards=str(shard_folder / f"train-0000{number}.tar"))


@pytest.fixture
def mixture(shard_folder: Path) -> MixtureSource:
    """8 samples, each 2.5 times an epoch, then 7 samples once."""
    return MixtureSource(
        [
            Ingredient("last", shard(shard_folder, 2), 2.5),
            Ingredient("first", shard(shard_folder, 0)),
        ]
    )


def test_samples_stand_one_set_after_the_other(mixture: MixtureSource, jpegs: list[bytes]) -> None:
    assert len(mixture) == 15
    assert mixture.labels.tolist() == [*range(12, 20), *range(7)]
    assert mixture.keys == [f"cat/{i:03d}" for i in mixture.labels]
    assert mixture.groups.tolist() == [0, 8, 15]
    assert mixture.sets == [(0, 8, 2.5), (8, 15, 1.0)]
    assert mixture.epoch_length == 8 * 2 + 4 + 7
    for index in (0, 7, 8, 14):
        sample = mixture[index]
        assert (sample.index, sample.label) == (index, mixture.labels[index])
        assert sample.image == jpegs[sample.label]
    assert "train-00000.tar" in mixture[8].origin


def test_groups_are_the_shards_of_all_sets(shard_folder: Path) -> None:
    both = ShardSource(shards=f"{shard_folder}/train-0000[12].tar")
    mixture = MixtureSource([Ingredient("a", shard(shard_folder, 0)), Ingredient("b", both)])
    assert mixture.groups.tolist() == [0, 7, 12, 20]


def test_sets_of_weight_1_are_the_same_stream_as_one_set(shard_folder: Path) -> None:
    """Same order, same crops, same masks: to name sets changes nothing but the digest."""
    mixture = MixtureSource([Ingredient(str(i), shard(shard_folder, i)) for i in range(3)])
    whole = ShardSource(shards=str(shard_folder))
    assert fingerprints(stream(mixture), 8) == fingerprints(stream(whole), 8)


def test_the_copies_of_a_sample_look_different(mixture: MixtureSource) -> None:
    batch = next(iter(stream(mixture, batch_size=27)))
    times = Counter(batch.index_B.tolist())
    assert sorted(times.values()) == [1] * 7 + [2] * 4 + [3] * 4
    assert len(set(hashes(batch))) == 27


def test_a_copy_is_keyed_by_the_sample_and_the_copy(mixture: MixtureSource) -> None:
    """Copy c of sample i has the key i + c * len, so copy 0 has the key it has without a weight."""
    batch = next(iter(stream(mixture, batch_size=27)))
    found = {tuple(view.flatten().tolist()) for view in batch.token_view_BChw}
    masks = {tuple(m.tolist()) for m in batch.mask_BN}
    for key in (3, 3 + 15):
        views = VIEWS(mixture[3].image, generator(Purpose.VIEW, seed=3, sample=key))
        assert tuple(views.token_view_Chw.flatten().tolist()) in found
        assert tuple(mask(generator(Purpose.MASK, seed=3, sample=key)).tolist()) in masks


def test_the_digest_is_of_sets_order_weights_and_labels(shard_folder: Path) -> None:
    one, other = (Ingredient(str(i), shard(shard_folder, i)) for i in (0, 1))
    mixtures = [
        [one, other],
        [other, one],
        [one],
        [one._replace(weight=2.0), other],
        [one._replace(has_labels=False), other],
    ]
    assert len({MixtureSource(mixture).digest for mixture in mixtures}) == 5
    renamed = [one._replace(name="x"), other]
    assert MixtureSource(renamed).digest == MixtureSource([one, other]).digest


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(15, list(range(15))), (99, list(range(15))), (6, [0, 1, 2, 8, 9, 10]), (1, [0]), (0, [])],
)
def test_the_first_samples_are_of_every_set(
    mixture: MixtureSource, limit: int, expected: list[int]
) -> None:
    """In proportion to their sizes, whatever their weights: 8 to 7."""
    assert first_samples(mixture.sets, limit).tolist() == expected


def test_an_evaluation_takes_of_every_set(mixture: MixtureSource) -> None:
    loader = eval_loader(source=mixture, view=VIEWS, mask=None, seed=0, batch_size=6, rank=0,
                         world=1, workers=0, limit=6)  # fmt: skip
    assert next(iter(loader)).label_B.tolist() == [12, 13, 14, 0, 1, 2]


def small_set(
    folder: Path, *, classes: list[str] | None, jpegs: list[bytes], label: int = 0
) -> str:
    """A shard of two samples whose keys are those of every other such set."""
    folder.mkdir()
    items = [Item(f"k{i}", jpegs[i], "jpg", label) for i in range(2)]
    write_shard(folder / "s-0.tar", items, split="s")
    if classes is not None:
        (folder / "classes.json").write_text(json.dumps(classes))
    return str(folder)


def settings(tmp_path: Path, sets: Sets, **more: object) -> DataConfig:
    return DataConfig.model_validate(
        {"train": sets, "heldout": None, "cache_dir": str(tmp_path), **more}
    )


def test_labels_that_mean_different_classes_are_refused(tmp_path: Path, jpegs: list[bytes]) -> None:
    pets = small_set(tmp_path / "pets", classes=["cat", "dog"], jpegs=jpegs)
    same = small_set(tmp_path / "same", classes=["cat", "dog"], jpegs=jpegs, label=1)
    cars = small_set(tmp_path / "cars", classes=[*"abcdefg"], jpegs=jpegs)
    unnamed = small_set(tmp_path / "unnamed", classes=None, jpegs=jpegs)
    train, _ = build_data(settings(tmp_path, [{"shards": s} for s in (unnamed, pets, same)]))
    assert train.classes == ["cat", "dog"]
    assert train.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert train.keys == ["k0", "k1"] * 3
    with pytest.raises(UserError) as caught:
        build_data(settings(tmp_path, [{"shards": pets}, {"shards": cars}]))
    for part in (f"{pets} has 2 (cat, dog)", f"{cars} has 7 (a, b, c, d, e, ...)", "labels: false"):
        assert part in str(caught.value)
    sets: Sets = [{"shards": pets}, {"shards": cars, "labels": False}]
    train, _ = build_data(settings(tmp_path, sets))
    assert train.classes == ["cat", "dog"]
    assert train.labels.tolist() == [0, 0, NO_LABEL, NO_LABEL]
    assert [train[i].label for i in range(4)] == train.labels.tolist()


def test_a_weight_that_draws_nothing_is_refused(tmp_path: Path, shard_folder: Path) -> None:
    sets: Sets = [{"shards": str(shard_folder)},
                  {"shards": str(shard_folder / "train-00001.tar"), "weight": 0.05}]  # fmt: skip
    with pytest.raises(UserError, match=r"weight 0\.05 of the 5 samples .* less than one sample"):
        build_data(settings(tmp_path, sets))
    sets[1]["weight"] = 0.11  # 0.55 samples
    assert build_data(settings(tmp_path, sets))[0].epoch_length == 21
    with pytest.raises(UserError, match=r"weight 0\.11 of the 2 samples"):  # of half of them
        build_data(settings(tmp_path, sets, subset=0.5))


def test_the_three_forms_of_a_configuration(tmp_path: Path, shard_folder: Path) -> None:
    names = [str(shard_folder / f"train-0000{i}.tar") for i in range(3)]
    folder = {"shards": str(shard_folder)}
    forms = [str(shard_folder), names, [folder], [{**folder, "weight": 1.0, "labels": True}]]
    built = [build_data(settings(tmp_path, form))[0] for form in forms]  # type: ignore[arg-type]
    assert {source.digest for source in built} == {ShardSource(shards=str(shard_folder)).digest}
    assert all(isinstance(source, ShardSource) for source in built)
    weighted, _ = build_data(settings(tmp_path, [{"shards": names[:2], "weight": 1.5}, folder]))
    assert weighted.sets == [(0, 12, 1.5), (12, 32, 1.0)]


def test_several_folders_of_images(tmp_path: Path, jpegs: list[bytes]) -> None:
    for folder, numbers in (("a", range(3)), ("b", range(3, 5))):
        (tmp_path / folder / "cat").mkdir(parents=True)
        for i in numbers:
            (tmp_path / folder / "cat" / f"{i}.jpg").write_bytes(jpegs[i])
    sets: Sets = [{"shards": str(tmp_path / "a")}, {"shards": str(tmp_path / "b"), "weight": 3}]
    train, _ = build_data(settings(tmp_path, sets, source="folder"))
    assert train.keys == [f"cat/{i}" for i in range(5)]
    assert train.epoch_length == 9
    patterns = [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(UserError, match=r"data\.source=folder reads one folder.*names 2"):
        build_data(settings(tmp_path, patterns, source="folder"))  # type: ignore[arg-type]


def test_held_out_of_every_set_and_judged_once(tmp_path: Path, shard_folder: Path) -> None:
    sets: Sets = [{"shards": str(shard_folder / "train-00000.tar"), "weight": 3.0},
                  {"shards": str(shard_folder / "train-00002.tar")}]  # fmt: skip
    train, heldout = build_data(settings(tmp_path, sets, heldout_fraction=0.4))
    assert heldout is not None
    every = sorted([*train.keys, *heldout.keys])
    assert every == [f"cat/{i:03d}" for i in (*range(7), *range(12, 20))]
    assert [part.weight for part in train.sets] == [3.0, 1.0]
    loader = eval_loader(source=heldout, view=VIEWS, mask=None, seed=0, batch_size=4, rank=0,
                         world=1, workers=0)  # fmt: skip
    index = torch.cat([batch.index_B for batch in loader]).numpy()
    assert sorted(index[index >= 0]) == list(range(len(heldout)))


def test_embedded_images_may_be_one_of_the_sets(tmp_path: Path) -> None:
    both: Sets = [{"shards": "embedded"}, {"shards": "mine"}]
    for heldout in ("embedded", "mine-too", None):
        check_splits(settings(tmp_path, both, heldout=heldout))
    for sets, heldout in ((both[:1], "mine"), (both[1:], "embedded")):
        with pytest.raises(UserError, match="not of one kind"):
            check_splits(settings(tmp_path, sets, heldout=heldout))
    check_splits(settings(tmp_path, both[1:], heldout="embedded", heldout_fraction=0.1))


def test_check_weights_lets_plain_sources_pass(shard_folder: Path) -> None:
    source = ShardSource(shards=str(shard_folder))
    check_weights(source)
    assert source.epoch_length == len(source) == 20
    assert np.array_equal(first_samples(source.sets, 5), np.arange(5))
