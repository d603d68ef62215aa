"""Stems x positions x branches x formats: each cell is proven or refused, and written down."""

import shutil

import pytest
from cases import WHOLE_MATRIX, export, formats, writes_graph
from matrix import Row, rows, table, target, written

from mimkit.errors import UserError


def test_the_table_in_the_docs_is_the_matrix() -> None:
    assert written() == table(), "see matrix.py, which writes it"


def _cells() -> list:
    """Formats that write a graph never refuse: they get every stem once, and every kind of
    positions with one branch and with two; with WHOLE_MATRIX=1 all."""
    every = rows()
    stems = list(dict.fromkeys(row[:2] for row in every))
    blocks = list(dict.fromkeys(row[2:] for row in every))
    traced = {stems[i % len(stems)] + blocks[i % len(blocks)]
              for i in range(max(len(stems), len(blocks)))}  # fmt: skip
    found = []
    for row in every:
        for one in formats():
            if WHOLE_MATRIX or row in traced or not writes_graph(*one.values):
                name = "-".join(map(str, (*row, *one.values)))
                found.append(pytest.param(row, *one.values, marks=one.marks, id=name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("row", "name"), _cells())
def test_a_cell_is_proven_or_refused(row: Row, name: str, tmp_path) -> None:
    path, expected = tmp_path / "encoder", target(row, name)
    if isinstance(expected, UserError):
        with pytest.raises(UserError) as refused:
            export(row.encoder(), path, name, fold=row.fold)
        assert str(refused.value) == str(expected)
        _check_reason(row, str(expected))
        assert list(tmp_path.iterdir()) == []
        return
    report = export(row.encoder(), path, name, fold=row.fold)
    assert report.architecture == expected
    assert report.max_difference <= report.tolerance <= 1e-4
    assert report.images == 4
    shutil.rmtree(tmp_path)


def _check_reason(row: Row, message: str) -> None:
    """Only timm refuses: relative positions are Beit's, which is linear and sequential."""
    assert row.positions in ("relative", "relative_shared")
    assert f"encoder.positions is {row.positions}" in message
    linear = row.stem == "linear" or row.fold
    assert (f"no place for the stem '{row.stem}'" in message) == (not linear)
    assert ("no blocks of 2 branches" in message) == (row.branches == 2)
    assert ("--fold" in message) == (row.stem == "linear_bn" and not row.fold)
    assert "take --format safetensors, hf" in message
