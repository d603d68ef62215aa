"""Intervals, corrections and power against scipy, closed forms and simulation."""

import importlib
import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

from mimkit.ablation.chance import chance_sentences, most_common_share
from mimkit.ablation.comparison import Scores, compare, decide
from mimkit.ablation.false_alarms import false_alarms
from mimkit.ablation.intervals import bootstrap_difference, mean_interval, paired_difference
from mimkit.ablation.significance import (
    holm,
    mcnemar,
    power,
    seeds_to_show,
    smallest_detectable,
)
from mimkit.ablation.verdict import Verdict, verdict
from mimkit.downstream.predictions import Predictions

REPEATS = 600


def _within_binomial(count: int, *, of: int, rate: float) -> None:
    low, high = stats.binom.ppf([0.0005, 0.9995], of, rate)
    assert low <= count <= high, f"{count / of:.3f} of {of}, expected {rate}"


def _noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def test_the_mean_has_scipys_t_interval() -> None:
    values = np.array([0.61, 0.64, 0.60, 0.66])
    value, low, high = mean_interval(values, confidence=0.9)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert (value, low, high) == pytest.approx((values.mean(), expected.low, expected.high))


def test_a_paired_difference_is_scipys_paired_t_test() -> None:
    arm, other = 0.6 + 0.01 * _noise((5,)), 0.59 + 0.01 * _noise((5,), 1)
    found, expected = paired_difference(arm, other, confidence=0.95), stats.ttest_rel(arm, other)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.interval == pytest.approx(((arm - other).mean(), interval.low, interval.high))


def test_one_seed_has_no_interval_and_equal_runs_differ_by_nothing() -> None:
    one = paired_difference(np.array([0.6]), np.array([0.5]), confidence=0.95)
    assert (one.interval.low, one.p, one.std) == (None, None, None)
    assert not one.interval.excludes_zero
    same = paired_difference(np.array([0.6, 0.7]), np.array([0.6, 0.7]), confidence=0.95)
    assert same.p is None and not same.interval.excludes_zero


def test_mcnemar_is_the_exact_binomial_test() -> None:
    rng = np.random.default_rng(3)
    arm, other = rng.random(200) < 0.7, rng.random(200) < 0.6
    found = mcnemar(arm, other)
    tables = importlib.import_module("statsmodels.stats.contingency_tables")
    both, none = (arm & other).sum(), (~arm & ~other).sum()
    table = [[both, found.only_arm], [found.only_other, none]]
    assert found.p == pytest.approx(tables.mcnemar(table, exact=True).pvalue)
    assert (found.only_arm, found.only_other) == ((arm > other).sum(), (other > arm).sum())
    assert mcnemar(arm, arm).p == 1


def test_holm_by_hand() -> None:
    """The example of Holm's step-down: times 3, 2, 1, never below the one before."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    drawn = np.random.default_rng(0).random(7) ** 3
    multiple = importlib.import_module("statsmodels.stats.multitest")
    assert holm(drawn.tolist()) == pytest.approx(multiple.multipletests(drawn, method="holm")[1])


def test_power_is_what_a_simulation_finds() -> None:
    expected = power(0.01, std=0.008, seeds=4, alpha=0.05)
    drawn = 0.01 + 0.008 * _noise((4 * REPEATS, 4))
    rejected = int((stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05).sum())
    _within_binomial(rejected, of=4 * REPEATS, rate=expected)


def test_power_is_statsmodels() -> None:
    weighty = importlib.import_module("statsmodels.stats.power").TTestPower()
    for seeds, alpha in ((3, 0.05), (5, 0.01), (20, 0.05)):
        for ratio in (0.1, 0.5, 1.5):
            expected = weighty.power(ratio, seeds, alpha)
            assert power(ratio, std=1.0, seeds=seeds, alpha=alpha) == pytest.approx(expected)


def test_the_smallest_difference_has_the_power_it_is_named_for() -> None:
    smallest = smallest_detectable(std=0.02, seeds=3, alpha=0.01)
    assert power(smallest, std=0.02, seeds=3, alpha=0.01) == pytest.approx(0.8, abs=1e-4)
    needed = seeds_to_show(0.0038, std=0.004, alpha=0.05)
    assert power(0.0038, std=0.004, seeds=needed, alpha=0.05) >= 0.8
    assert power(0.0038, std=0.004, seeds=needed - 1, alpha=0.05) < 0.8
    with pytest.raises(ValueError, match="at least 2"):
        smallest_detectable(std=0.02, seeds=1, alpha=0.05)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Three seeds whose own effect both arms share: pairing takes it out."""
    shared, rng = 0.05 * _noise((REPEATS, 3)), np.random.default_rng(1)
    covered = 0
    for row in shared:
        arm, other = (row + 0.01 * rng.normal(size=3) for _ in range(2))
        _, low, high = paired_difference(arm + 0.02, other, confidence=0.9).interval
        assert low is not None and high is not None
        covered += low <= 0.02 <= high
    _within_binomial(covered, of=REPEATS, rate=0.9)


def test_the_bootstrap_has_the_spread_of_seeds_and_images() -> None:
    """That of seeds, that of images, and what belongs to neither a third time (Owen 2007)."""
    rng = np.random.default_rng(0)
    arm, other = (rng.random((30, 400)) < 0.6 for _ in range(2))
    value, low, high = bootstrap_difference(arm, other, confidence=0.95)
    gain = arm.astype(float) - other
    variance = gain.mean(1).var(ddof=1) / 30 + gain.mean(0).var(ddof=1) / 400
    variance += gain.var() / (30 * 400)
    assert value == pytest.approx(gain.mean())
    assert low is not None and high is not None
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(variance), rel=0.1)


def _scores(
    arms: int, seeds: int, rng: np.random.Generator, gain: float = 0.0
) -> dict[str, Scores]:
    shared = 0.03 * rng.normal(size=seeds)
    drawn = 0.6 + shared + 0.01 * rng.normal(size=(arms, seeds))
    drawn[1] += gain
    return {str(arm): Scores(dict(enumerate(row)), {}) for arm, row in enumerate(drawn.tolist())}


@pytest.mark.parametrize("arms", [2, 5])
def test_the_family_is_wrong_at_most_as_often_as_it_says(arms: int) -> None:
    """One comparison exactly at 5 %; a family of four, of one reference, not above it."""
    rng, alarms = np.random.default_rng(arms), 0
    for _ in range(REPEATS):
        found = decide(_scores(arms, 3, rng), against="0", confidence=0.95)
        alarms += any(one.shown for one in found.values())
    if arms == 2:
        _within_binomial(alarms, of=REPEATS, rate=0.05)
    assert alarms <= stats.binom.ppf(0.9995, REPEATS, 0.05)


def test_the_power_of_the_family_is_at_least_bonferronis() -> None:
    rng, seen = np.random.default_rng(0), 0
    for _ in range(300):
        seen += decide(_scores(3, 4, rng, gain=0.06), against="0", confidence=0.95)["1"].shown
    least = power(0.06, std=0.01 * math.sqrt(2), seeds=4, alpha=0.025)
    assert seen >= stats.binom.ppf(0.0005, 300, least)


def _drawn_study(rng: np.random.Generator) -> dict[str, Scores]:
    """2 to 6 arms, 2 to 5 seeds, so few images that pairs often differ by the same."""
    images = int(rng.choice([16, 64, 10_000]))
    seeds = range(int(rng.integers(2, 6)))
    effects = [0.0, *(rng.choice([0, 0.01, 0.05, -0.1], size=rng.integers(1, 6)))]
    shared = 0.5 + 0.02 * rng.normal(size=len(seeds))
    return {
        f"arm{number}" if number else "linear":
            Scores({s: round((shared[s] + effect + 0.01 * rng.normal()) * images) / images
                    for s in seeds}, {})
        for number, effect in enumerate(effects)
    }  # fmt: skip


def _inside(text: str) -> list[tuple[float, float]]:
    return [(float(low), float(high)) for low, high in re.findall(r"\[(\S+), (\S+)\] points", text)]


def test_what_a_study_claims_is_what_holm_decides_and_what_its_intervals_say() -> None:
    """Better or worse exactly where the interval excludes zero, and no sentence says otherwise."""
    rng, claims, stopped, same = np.random.default_rng(5), 0, 0, 0
    for _ in range(120):
        scores = _drawn_study(rng)
        found = compare(scores, against="linear", confidence=0.95)
        said = verdict(found, [], measure="knn", confidence=0.95)
        p = [1.0 if one.difference.p is None else one.difference.p for one in found]
        rejected = [adjusted < 0.05 for adjusted in holm(p)]
        assert [one.shown for one in found] == rejected
        for one in found:
            assert one.corrected is not None
            assert one.shown == one.corrected.excludes_zero
            same += one.corrected.low is None
        above = {one.arm: one.difference.interval.value > 0 for one in found if one.shown}
        assert (set(said.better), set(said.worse)) == (
            {arm for arm in above if above[arm]}, {arm for arm in above if not above[arm]}
        )  # fmt: skip
        first = said.sentences[0]
        assert bool(above) == (" is better than " in first or " is worse than " in first)
        if not above:
            assert all(low <= 0 <= high for low, high in _inside(first))
            ends = [(one.corrected.low, one.corrected.high) for one in found if one.corrected]
            assert all(low is None or high is None or low <= 0 <= high for low, high in ends)
        claims += len(above)
        stopped += not above and min(p) < 0.05
    assert min(claims, stopped, same) > 3, "all of it came up"


def test_arms_after_the_one_at_which_holm_stops_are_judged_at_its_level() -> None:
    """p = 0.04 and 0.045: neither is below 0.025, and 0.045 < 0.05 is not asked any more."""
    base, spread = np.array([0.5, 0.52, 0.51]), np.array([-1.0, 0.0, 1.0])
    scores = {"linear": _arm(*base)}
    for name, p, mean in (("x", 0.04, 0.02), ("y", 0.045, 0.05)):
        std = mean * math.sqrt(3) / stats.t.isf(p / 2, 2)
        scores[name] = _arm(*(base + mean + spread * std))
    found = compare(scores, against="linear", confidence=0.95)
    assert [one.difference.p for one in found] == pytest.approx([0.04, 0.045])
    for one in found:
        mine = np.array(list(scores[one.arm].accuracy.values()))
        expected = stats.ttest_rel(mine, base).confidence_interval(0.975)
        assert one.corrected is not None
        assert one.corrected[1:] == pytest.approx((expected.low, expected.high))
        assert not one.shown and not one.corrected.excludes_zero
    said = str(verdict(found, [], measure="knn", confidence=0.95))
    assert "every interval holds zero, also that of the largest difference (y, +5.00 [-1.81" in said


def test_pairs_that_all_differ_by_the_same_show_nothing() -> None:
    """By the same but for the rounding of floating-point numbers."""
    same = compare({"linear": _arm(0.6, 0.3), "x": _arm(0.65, 0.35), "y": _arm(0.6, 0.38)},
                   against="linear", confidence=0.95)  # fmt: skip
    assert (0.65 - 0.6) - (0.35 - 0.3) != 0
    x, y = same
    assert x.corrected is not None and y.corrected is not None
    assert (x.difference.p, x.adjusted_p, x.shown) == (None, None, False)
    assert (x.corrected.low, x.smallest, x.seeds_for_paper) == (None, None, None)
    other = np.array([0.0, 0.08])  # corrected for two arms, although one has no p
    expected = stats.ttest_1samp(other, 0).confidence_interval(0.975)
    assert y.corrected[1:] == pytest.approx((expected.low, expected.high))
    said = str(verdict(same, [], measure="knn", confidence=0.95))
    assert "the interval of y holds zero" in said
    assert "all pairs of seeds differ by the same: x minus linear +5.00 points" in said
    alone = str(verdict(same[:1], [], measure="knn", confidence=0.95))
    assert (
        "x is not shown to be better or worse than linear: no difference has an interval" in alone
    )


@pytest.mark.parametrize("images", [64, 100, 256])
def test_two_seeds_of_few_images_raise_no_more_false_alarms_than_they_say(images: int) -> None:
    """Equal stems that disagree on a fifth of the images: often by as many in both pairs."""
    rng, alarms, equal = np.random.default_rng(images), 0, 0
    repeats = 3 * REPEATS
    for _ in range(repeats):
        gains = [2 * rng.binomial(k, 0.5) - k for k in rng.binomial(images, 0.2, size=2)]
        arm = Scores({seed: 0.5 + gain / images for seed, gain in enumerate(gains)}, {})
        found = decide({"linear": _arm(0.5, 0.5), "x": arm}, against="linear", confidence=0.95)
        alarms += found["x"].shown
        equal += gains[0] == gains[1]
    assert equal > 0.02 * repeats
    assert alarms <= stats.binom.ppf(0.9995, repeats, 0.05)


def test_resampled_aa_studies_keep_the_nominal_rate() -> None:
    rng = np.random.default_rng(0)
    difficulty = rng.beta(2, 1, size=300)
    hits = rng.random((4, 300)) < np.clip(difficulty + 0.05 * rng.normal(size=(4, 1)), 0, 1)
    found = false_alarms(hits, arms=2, seeds=3, confidence=0.95, repeats=1000)
    assert found.low <= found.claims <= found.high
    assert found.mcnemar > 0.02


def _verdict(scores: dict[str, Scores], control: str | None = None) -> Verdict:
    reference = compare(scores, against="linear", confidence=0.95)
    against = compare(scores, against=control, confidence=0.95) if control else []
    return verdict(reference, against, measure="knn", confidence=0.95)


def _arm(*accuracies: float) -> Scores:
    return Scores(dict(enumerate(accuracies)), {})


def test_no_winner_without_an_interval_that_excludes_zero() -> None:
    unclear = _verdict({"linear": _arm(0.60, 0.62, 0.61), "hmlp": _arm(0.61, 0.60, 0.65)})
    assert (unclear.better, unclear.worse) == ((), ())
    assert "hmlp is not shown to be better or worse than linear: the interval" in str(unclear)
    assert "+0.38" in str(unclear)
    for word in ("number of arms", "depending on the arm", "highest mean", "no arm"):
        assert word not in str(unclear), "it is one"
    clear = _verdict({"linear": _arm(0.60, 0.62, 0.61), "hmlp": _arm(0.650, 0.671, 0.662),
                      "big": _arm(0.651, 0.672, 0.659)}, control="big")  # fmt: skip
    assert set(clear.better) == {"hmlp", "big"}
    assert "hmlp is better than linear by +5.10 [" in str(clear)
    assert "the control big too, which spends" in str(clear) and "is none of them: " in str(clear)


def test_arms_at_chance_are_named() -> None:
    """Two of five images have the most common class: 40 % is what naming it gets."""
    found = Predictions(
        torch.arange(5), torch.tensor([0, 2, 2, 1, 0]), torch.tensor([[0, 1, 2]] * 5),
        torch.zeros(5), torch.zeros(5), num_classes=3, source="",
    )  # fmt: skip
    share = most_common_share(found)
    assert share == float(found.correct.double().mean()) == 0.4
    scores = {"linear": _arm(0.6, 0.6), "levit": _arm(0.4, 0.4), "hmlp": _arm(0.2, 0.6)}
    [said] = chance_sentences(scores, share)
    assert said.startswith("At chance: levit with every seed, hmlp with 1 of 2 seeds. ")
    assert "common class has, 40.00 %" in said
    assert chance_sentences({"linear": _arm(0.6, 0.6)}, share) == []
    assert chance_sentences(scores, None) == [], "reports of before do not know it"


def test_one_seed_gives_no_verdict_and_says_why() -> None:
    found = _verdict({"linear": _arm(0.6), "hmlp": _arm(0.9)})
    assert found.better == ()
    assert "with one seed" in str(found) and "Set seeds" in str(found)
    assert "There is no verdict" in str(_verdict({"linear": _arm(0.6, 0.7)}))
