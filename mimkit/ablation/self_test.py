"""Is the harness to be believed? It must not cry wolf, and it must see a wolf."""

import numpy as np

from mimkit.ablation.false_alarms import FalseAlarms, false_alarms
from mimkit.ablation.machine import Slot
from mimkit.ablation.results import collect
from mimkit.ablation.study import Prepared, Say, prepare, report_study, run_study
from mimkit.config import StudyConfig
from mimkit.errors import UserError

_REPEATS = 2000
_NAMES = (2, 11)  # arms of an A/A study: one comparison, and as many as Table 7 has
_PEOPLE = ("A/A: one stem under {arms} names x {seeds} seeds, {repeats} studies drawn from stored "
           "results of {stored} runs")  # fmt: skip


def self_test(study: StudyConfig, slots: list[Slot], *, say: Say) -> bool:
    """Runs it, prints both results, and says whether both are as they must be.

    Raises:
        UserError: a run failed.
    """
    prepared = prepare(study, slots, say=say)
    say(str(prepared.estimate))
    if failures := prepared.failures or run_study(prepared, slots, say=say):
        raise UserError(f"{failures[0].arm} failed: {failures[0].error}")
    record, page = report_study(prepared, [])
    quiet = [_say_alarms(prepared, arms, say) for arms in _NAMES]
    seen = "damaged" in record["verdict"]["worse"]
    say(f"known difference: a stem that reads its patches in a wrong order "
        f"{'loses, as it must' if seen else 'is NOT seen to lose'}: "
        f"{record['verdict']['sentences'][0]}")  # fmt: skip
    say(f"report: {page}")
    return all(quiet) and seen


def _say_alarms(prepared: Prepared, arms: int, say: Say) -> bool:
    """More false alarms than the nominal rate allows for are a failure; fewer are not."""
    study = prepared.plan.study
    scores = collect(prepared.plan)[1][study.primary][study.reference]
    hits_SB = np.stack(list(scores.hits.values()))
    found = false_alarms(hits_SB, arms=arms, seeds=len(study.seeds), confidence=study.confidence,
                         repeats=_REPEATS)  # fmt: skip
    say(_sentence(found, arms, len(study.seeds), len(hits_SB)))
    return found.claims <= found.high


def _sentence(found: FalseAlarms, arms: int, seeds: int, stored: int) -> str:
    people = _PEOPLE.format(arms=arms, seeds=seeds, repeats=found.repeats, stored=stored)
    fine = "as it must be" if found.claims <= found.high else "TOO OFTEN"
    return (
        f"{people}: a difference is claimed in {found.rate:.1%} of them, {fine} (nominal "
        f"{found.nominal:.0%} at most; 99 % of {found.repeats} such tests find "
        f"{found.low / found.repeats:.1%} to {found.high / found.repeats:.1%}). McNemar's test of "
        f"single pairs of runs would claim one in {found.mcnemar:.1%}"
    )
