"""Stems x positions x branches x formats: each cell is proven or refused, and written down."""

import os
import shutil

import pytest
from cases import export, formats
from matrix import Row, rows, table, target, written

from mimkit.errors import UserError
from mimkit.export import EXPORTERS


def test_the_table_in_the_docs_is_the_matrix() -> None:
    assert written() == table(), "see matrix.py, which writes it"


def _cells() -> list:
    """Formats that write a graph take seconds a cell and never refuse: of each stem they get one
    sequential and one parallel encoder, with positions in turn; with WHOLE_MATRIX=1 all."""
    whole = bool(os.environ.get("WHOLE_MATRIX"))
    kinds = list(dict.fromkeys(row[:2] for row in rows()))
    positions = list(dict.fromkeys(row.positions for row in rows()))
    found = []
    for row in rows():
        turn = (kinds.index(row[:2]) + positions.index(row.positions)) % len(positions)
        for one in formats():
            turns = EXPORTERS[one.values[0]]().casts or turn == 2 * (row.branches - 1)
            if whole or turns:
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
