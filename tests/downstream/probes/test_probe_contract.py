"""What every probe must do, over the registry."""

import inspect

import pytest
import torch
from drawn import NUM_CLASSES, draw_features

from mimkit.downstream.probes import PROBES, Candidate, Candidates, Probe, all_rows
from mimkit.downstream.select import select, split
from mimkit.errors import UserError


def _quiet(stage: str, done: int, total: int) -> None: ...


def _make(name: str, *, least: int) -> Probe:
    """With so many updates, where it is trained."""
    part = PROBES[name]
    takes = inspect.signature(part).parameters
    return part(epochs=1, least=least) if "least" in takes else part()


@pytest.mark.parametrize("name", PROBES.names())
def test_finds_the_layer_that_knows(name: str) -> None:
    train, test = draw_features(240, seed=0), draw_features(200, seed=1)
    found = select(_make(name, least=120), train, test, num_classes=NUM_CLASSES, seed=0,
                   progress=_quiet, source="x")  # fmt: skip
    accuracy = float(found.predictions.correct.double().mean())
    if PROBES[name].needs_tokens:
        assert found.best.candidate.layer == 6
    else:
        assert found.best.candidate.layer == 4 and "cls" in found.best.candidate.pooling
    assert 0.75 < accuracy < 1  # the classes overlap; chance is 0.25
    assert found.best.top1 == max(tried.top1 for tried in found.table)
    assert (found.validation_images, found.train_images) == (48, 240)
    assert torch.equal(found.predictions.label_B, test.label_B)


@pytest.mark.parametrize("name", PROBES.names())
def test_one_candidate_alone_equals_the_sweep(name: str) -> None:
    """Heads do not feel each other: the winner is what it was among all."""
    train = draw_features(60, seed=0)
    probe = _make(name, least=15)
    everything = probe.candidates(train)
    fit, rows = all_rows(train)[:40], all_rows(train)[40:]

    def run(candidates: Candidates) -> dict[Candidate, torch.Tensor]:
        return probe.logits(candidates, train, fit, train, rows, num_classes=NUM_CLASSES,
                            progress=lambda done, total: None)  # fmt: skip

    swept = run(everything)
    assert len(swept) == len(everything.layers) * len(everything.poolings) * len(
        everything.settings
    )
    chosen = [*swept][len(swept) // 2]
    [alone] = run(Candidates.only(chosen)).values()
    torch.testing.assert_close(alone, swept[chosen], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PROBES.names())
def test_the_test_split_chooses_nothing(name: str) -> None:
    """Other test labels change neither the table nor the guesses."""
    train, test = draw_features(80, seed=0), draw_features(40, seed=1)
    wrong = draw_features(40, seed=1)
    wrong.label_B.copy_((wrong.label_B + 1) % NUM_CLASSES)
    one, other = (
        select(_make(name, least=10), train, judged, num_classes=NUM_CLASSES, seed=0,
               progress=_quiet, source="x") for judged in (test, wrong)
    )  # fmt: skip
    assert one.table == other.table and one.best == other.best
    assert torch.equal(one.predictions.best_BK, other.predictions.best_BK)


def test_every_class_is_held_out() -> None:
    label_B = torch.tensor([0] * 50 + [1] * 9 + [2] * 2)
    fit, held = split(label_B, seed=0)
    assert sorted([*fit.tolist(), *held.tolist()]) == list(range(61))
    assert label_B[held].bincount().tolist() == [10, 2, 1]
    assert torch.equal(split(label_B, seed=0)[1], held)
    assert not torch.equal(split(label_B, seed=1)[1], held)
    with pytest.raises(UserError, match="class 3 has one training image"):
        split(torch.tensor([0, 0, 3]), seed=0)
