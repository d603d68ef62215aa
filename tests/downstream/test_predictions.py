"""Predictions: what is kept, that a file gives it back, and that only like is paired with like."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mimkit.downstream.predictions import (
    FILE,
    Predictions,
    from_logits,
    load_predictions,
    paired,
)
from mimkit.errors import UserError


def make_predictions(*, images: int = 60, classes: int = 7, seed: int = 0) -> Predictions:
    """Of random logits that know the label a little."""
    draw = torch.Generator().manual_seed(seed)
    label_B = torch.arange(images) % classes
    logit_BV = torch.randn(images, classes, generator=draw)
    logit_BV[torch.arange(images), label_B] += 1
    names = [f"c{number}" for number in range(classes)]
    return from_logits(logit_BV, label_B=label_B, index_B=torch.arange(images), source="s" * 32,
                       classes=names, made_by={"model": "random"})  # fmt: skip


def test_rows_equal_softmax_and_sort() -> None:
    draw = torch.Generator().manual_seed(3)
    logit_BV, label_B = torch.randn(9, 8, generator=draw), torch.arange(9) % 8
    found = from_logits(logit_BV, label_B=label_B, index_B=torch.arange(9), source="x")
    probability_BV = logit_BV.softmax(1)
    assert torch.equal(found.best_BK, logit_BV.argsort(dim=1, descending=True)[:, :5])
    torch.testing.assert_close(found.confidence, probability_BV.max(1).values)
    torch.testing.assert_close(found.probability, probability_BV[torch.arange(9), label_B])
    assert torch.equal(found.correct, logit_BV.argmax(1) == label_B)


def test_images_come_in_any_order() -> None:
    found = from_logits(torch.eye(3), label_B=torch.arange(3), index_B=torch.tensor([70, 5, 99]),
                        source="x")  # fmt: skip
    assert found.index_B.tolist() == [5, 70, 99] and found.label_B.tolist() == [1, 0, 2]
    assert found.best_BK[:, 0].tolist() == [1, 0, 2]
    with pytest.raises(UserError, match="not numbered upwards"):
        from_logits(torch.eye(2), label_B=torch.arange(2), index_B=torch.tensor([4, 4]), source="x")


def test_a_file_gives_back_every_bit(tmp_path: Path) -> None:
    made = make_predictions()
    made.save(tmp_path / FILE)
    found = load_predictions(tmp_path)
    for name in Predictions.__dataclass_fields__:
        value, expected = getattr(found, name), getattr(made, name)
        same = torch.equal(value, expected) if torch.is_tensor(value) else value == expected
        assert same, name
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no"):
        load_predictions(tmp_path / "nothing")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"expected 'mimkit\.predictions\.1'"):
        load_predictions(tmp_path / "other.safetensors")
    (tmp_path / "text").write_text(json.dumps({}))
    with pytest.raises(UserError, match="damaged"):
        load_predictions(tmp_path / "text")


def test_like_is_paired_with_like() -> None:
    one, other = make_predictions(seed=0), make_predictions(seed=1)
    pair = paired(one, other)
    assert torch.equal(pair.one_B, one.correct) and torch.equal(pair.other_B, other.correct)
    assert paired(one, replace(other, classes=())).one_B.equal(one.correct)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": "t" * 32}, "source is 'ssss"),
        ({"classes": tuple("abcdefg")}, "classes is 'c0, c1"),
        ({"label_B": (torch.arange(60) + (torch.arange(60) == 3)) % 7}, "1 of 60 images have an"),
        ({"index_B": torch.arange(60) + 10}, "60 and 60 images, 50 of them in both"),
    ],
)
def test_unlike_is_refused(change: dict[str, object], said: str) -> None:
    one = make_predictions()
    with pytest.raises(UserError, match=said):
        paired(one, replace(one, **change))  # type: ignore[arg-type]


def test_labels_that_the_model_does_not_know() -> None:
    with pytest.raises(UserError, match=r"from 0 to 3 .* knows 3 classes"):
        from_logits(torch.zeros(2, 3), label_B=torch.tensor([0, 3]), index_B=torch.arange(2),
                    source="x")  # fmt: skip


def test_logits_that_are_not_finite() -> None:
    with pytest.raises(UserError, match="not finite"):
        from_logits(torch.full((1, 3), torch.nan), label_B=torch.tensor([0]),
                    index_B=torch.tensor([0]), source="x")  # fmt: skip
