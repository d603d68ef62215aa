"""What the small benches print and write."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mimkit.bench.comparison import Comparison
from mimkit.cli._bench._shown import shown


def as_text(comparisons: Sequence[Comparison]) -> str:
    """For people."""
    return "\n\n".join("\n".join(_lines(comparison)) for comparison in comparisons)


def _lines(comparison: Comparison) -> list[str]:
    unit = "ms" if comparison.per == 1 else "ms an image"
    heading = f"{'':28}{unit:>12}  {'time / ' + comparison.base:28}"
    lines = [comparison.title, heading + "".join(f"{name:>14}" for name in comparison.columns)]
    for way in comparison.seconds:
        cells = (found.get(way) for found in comparison.columns.values())
        lines.append(
            f"{way:28}{comparison.milliseconds(way).median:12.2f}  "
            f"{shown(comparison.time_ratio(way), 3):28}"
            + "".join(f"{'' if cell is None else format(cell, '.2f'):>14}" for cell in cells)
        )
    return [line.rstrip() for line in lines] + list(comparison.notes)


def as_numbers(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """For programs: all that was measured, medians and ratios."""
    return {"comparisons": [
        {
            **asdict(comparison),
            "milliseconds": {w: comparison.milliseconds(w)._asdict() for w in comparison.seconds},
            "time_ratio": {w: comparison.time_ratio(w)._asdict() for w in comparison.seconds},
        }
        for comparison in comparisons
    ]}  # fmt: skip
