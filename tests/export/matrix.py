"""Which class holds which encoder, in every format: the table in docs/exports.md.

`test_matrix.py` compares it with the exporters, and proves each cell. From the folder tests/export,
`PYTHONPATH=../.. python matrix.py` writes it again.
"""

import itertools
from pathlib import Path
from typing import NamedTuple, get_args

from cases import make_encoder

from mimkit.errors import UserError
from mimkit.export import EXPORTERS
from mimkit.models.calibration import batch_norms
from mimkit.models.encoder import ImageEncoder, Positions
from mimkit.models.stems import STEMS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "exports.md"
BEGIN, END = "<!-- the matrix begins -->", "<!-- the matrix ends -->"
BRANCHES = (1, 2)


class Row(NamedTuple):
    """An encoder; `fold` is written as --fold."""

    stem: str
    fold: bool
    positions: str
    branches: int

    def encoder(self) -> ImageEncoder:
        """Of one block on a square grid: the graphs of formats that trace are small."""
        return make_encoder(self.stem, positions=self.positions, branches=self.branches,
                            depth=1, grid=(2, 2)).eval()  # fmt: skip


def rows() -> list[Row]:
    """Every stem as it is, and folded where that makes another stem of it."""
    found = []
    for stem in STEMS.names():
        made = make_encoder(stem, depth=1).stem
        folds = [True] if batch_norms(made) and made.folded().name != stem else []
        found += itertools.product([stem], [False, *folds], get_args(Positions), BRANCHES)
    return [Row(*cell) for cell in found]


def target(row: Row, name: str) -> str | UserError:
    """The class that `--format name` takes, or why it refuses."""
    encoder = row.encoder()
    if row.fold:
        encoder.stem = encoder.stem.folded()
    try:
        return EXPORTERS[name]().architecture(encoder)
    except UserError as error:
        return error


def table() -> str:
    formats = EXPORTERS.names()
    lines = [f"| stem | positions | branches | {' | '.join(formats)} |",
             "|---|---|---|" + "---|" * len(formats)]  # fmt: skip
    for row in rows():
        cells = [target(row, name) for name in formats]
        texts = ["-" if isinstance(cell, UserError) else f"`{cell}`" for cell in cells]
        stem = f"{row.stem} `--fold`" if row.fold else row.stem
        lines.append(f"| {stem} | {row.positions} | {row.branches} | {' | '.join(texts)} |")
    return "\n".join(lines)


def written() -> str:
    """The table as it stands in the docs."""
    text = DOCS.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def write() -> None:
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()
