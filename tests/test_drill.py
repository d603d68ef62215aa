"""`mimkit drill`: its short form holds here, and a promise that is broken is told."""

import json
from pathlib import Path

import pytest
from commands import ROOT, command

from mimkit import drills
from mimkit.cli import main
from mimkit.drills import Drill, all_drills, run_drills
from mimkit.drills._runs import Bench, BrokenPromiseError


def _broken(bench: Bench) -> str:
    raise BrokenPromiseError("7 tensors differ")


def _failing(bench: Bench) -> str:
    raise ZeroDivisionError


DRILLS = [Drill("good", "all is well", lambda bench: f"{bench.kills} and {bench.save_kills}"),
          Drill("bad", "never breaks", _broken), Drill("ill", "never fails", _failing)]  # fmt: skip


def test_outcomes_tell_what_held(tmp_path: Path) -> None:
    good, bad, ill = run_drills(DRILLS, tmp_path, kills=3, save_kills=4)
    assert (good.held, good.said) == (True, "3 and 4")
    assert (bad.held, bad.said) == (False, "7 tensors differ")
    assert not ill.held and "ZeroDivisionError" in ill.said


def test_a_broken_promise_makes_the_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drills, "all_drills", lambda: DRILLS)
    assert main(["drill", "--only", "good", "--kills", "1"]) == 0
    assert "1 of 1 promises held" in capsys.readouterr().out
    assert main(["drill", "--json", str(tmp_path / "drill.json")]) == 1
    said = capsys.readouterr().out
    assert "1 of 3 promises held; broken: bad, ill" in said
    assert "BROKEN bad" in said and "7 tensors differ" in said
    table = json.loads((tmp_path / "drill.json").read_text())
    assert [(row["name"], row["held"]) for row in table] == [
        ("good", True), ("bad", False), ("ill", False),
    ]  # fmt: skip
    assert main(["drill", "--only", "nothing"]) == 2
    assert "names no drill. There are 'good', 'bad', 'ill'" in capsys.readouterr().err


def test_every_drill_has_a_name_of_its_own() -> None:
    names = [drill.name for drill in all_drills()]
    assert len(names) > 12 and len(set(names)) == len(names)


@pytest.mark.slow
def test_the_short_form_holds(tmp_path: Path) -> None:
    words = [ROOT / "tools" / "drill.py", "--short", "--json", tmp_path / "drill.json"]
    ended = command(words, cwd=tmp_path, timeout=1200)
    assert ended.code == 0, ended.out[-3000:] + ended.err[-3000:]
    table = json.loads((tmp_path / "drill.json").read_text())
    assert [row["name"] for row in table] == [d.name for d in all_drills() if d.short]
    assert all(row["held"] for row in table)
