"""Things are measured in turns, each as often as the others."""

import subprocess
import sys

import pytest
import torch

from mimkit.bench.data_stages import _cpu_of
from mimkit.bench.timing import Spread, one_thread, spread, take_turns


def test_works_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10_000, 3))  # three seconds pass between two readings of the clock
    monkeypatch.setattr("mimkit.bench.timing.cpu_seconds", lambda: next(ticks))
    monkeypatch.setattr("mimkit.bench.timing._TURN", 2)
    seen: list[str] = []
    works = {
        "a": lambda item: seen.append(f"a{item}"),
        "b": lambda item: (seen.append(f"b{item}"), next(ticks)),
    }
    seconds = take_turns(works, [1, 2, 3], rounds=2, done=lambda: seen.append("."))
    assert " ".join(seen) == "a1 a2 b1 b2 a3 b3 . a1 a2 b1 b2 a3 b3 ."
    assert seconds == {"a": [6, 6], "b": [15, 15]}


def test_a_spread_is_median_least_and_most() -> None:
    assert spread([5.0, 1.0, 2.0]) == Spread(median=2.0, least=1.0, most=5.0)


def test_one_thread_is_left_again() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_cpu_time_of_children_counts() -> None:
    """An interpreter takes some hundredths of a second to start, nearly all of it in the child."""
    child = [sys.executable, "-c", "sum(range(3_000_000))"]
    assert _cpu_of(lambda: subprocess.run(child, check=True)) > 0.03
    assert _cpu_of(lambda: None) < 0.03
