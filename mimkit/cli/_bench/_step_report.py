"""What `mimkit bench step` prints and writes."""

from dataclasses import asdict
from typing import Any

from mimkit.bench.step import Precision, Report, Row
from mimkit.cli._bench._shown import shown
from mimkit.runs import versions


def as_text(report: Report) -> str:
    """For people."""
    ceilings = ", ".join(f"{name} {rate:.0f}" for name, rate in report.ceilings.items())
    lines = [
        f"ViT-{report.size}/16 at 224 pixels, batch {report.batch}, 75 of 196 patches masked, "
        f"tokens given; {report.device}, torch {versions()['torch']}",
        f"arithmetic of an image: {report.forward_gflop:.2f} GFLOP forward, "
        f"{report.step_gflop:.2f} with backward",
        f"matrix products, GFLOP/s: {ceilings}",
    ]
    if report.onednn_speed:
        choice = next((p.matmul for p in report.precisions if not p.bf16), None)
        chosen = f"; fp32 steps use {choice}" if choice else ""
        lines.append(f"probe: oneDNN has {report.onednn_speed:.2f} of the speed of torch's own "
                     f"fp32 product{chosen}")  # fmt: skip
    for precision in report.precisions:
        lines += ["", *_precision(report, precision)]
    return "\n".join(lines)


def _precision(report: Report, precision: Precision) -> list[str]:
    name = "bf16 autocast" if precision.bf16 else "fp32"
    proofs = "; ".join(
        f"{way}: loss {proof.loss:.0e}, gradients {proof.gradients:.0e}"
        for way, proof in precision.proofs.items()
    )
    return [
        f"{name}. Equal to the plain step within (relative) {proofs}",
        f"{'':26}{'images/s':>10}  {'times plain (spread)':24}{'MFU':>6}{'saved':>9}{'peak':>9}"
        "   MiB an image",
        *(_row(report, precision, way, row) for way, row in precision.rows.items()),
    ]


def _row(report: Report, precision: Precision, way: str, row: Row) -> str:
    mfu = report.mfu(row, bf16=precision.bf16)
    peak = "-" if row.peak_mib is None else f"{row.peak_mib / report.batch:.1f}"
    return (f"{way:26}{report.images_per_second(row).median:10.2f}  "
            f"{shown(precision.ratio(way)):24}{mfu:6.2f}{row.saved_mib:9.1f}{peak:>9}")  # fmt: skip


def as_numbers(report: Report) -> dict[str, Any]:
    """For programs: all that was measured, and what is printed of it."""
    numbers = asdict(report)
    for found, precision in zip(numbers["precisions"], report.precisions, strict=True):
        for way, row in precision.rows.items():
            found["rows"][way] |= {
                "images_per_second": report.images_per_second(row).median,
                "times_plain": precision.ratio(way)._asdict(),
                "mfu": report.mfu(row, bf16=precision.bf16),
            }
    return numbers
