"""What `mimkit bench data` prints and writes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mimkit.bench.data import Report
from mimkit.runs import versions

_LABELS = {
    "read": "read (from memory, once it was read)",
    "decode": "decode",
    "draw": "random draws",
    "jitter": "jitter, flip, crop",
    "resize": "resize to two views",
    "mask": "mask",
    "transfer": "transfer (stack, loader process)",
}
_SMALL = "the embedded data set, whose crops are SMALL: these are not the numbers of ImageNet"


def as_text(report: Report, *, shards: str | None, rates: Sequence[float]) -> str:
    """For people; `rates` are images a second that a GPU takes."""
    return "\n".join([
        *_heading(report, shards),
        "",
        *_stages(report),
        "",
        *_comparison(report),
        "",
        *(f"a GPU of {rate:,.0f} images/s needs {report.cores(rate):.1f} cores" for rate in rates),
    ])  # fmt: skip


def as_numbers(report: Report, *, shards: str | None, rates: Sequence[float]) -> dict[str, Any]:
    """For programs: six numbers by name, which are medians, and all that was measured."""
    return {
        "images_per_second_per_core": report.speed("ours").median,
        "reference_images_per_second_per_core": report.speed("beit").median,
        "ratio": report.ratio("ours", "beit").median,
        "decode_ceiling_share": report.ratio("ours", "decode").median,
        "max_level_difference": report.difference.most,
        "mean_level_difference": report.difference.mean,
        "data": shards or "embedded",
        "cores": {f"{rate:g}": report.cores(rate) for rate in rates},
        "versions": versions(),
        "report": asdict(report),
    }


def _heading(report: Report, shards: str | None) -> list[str]:
    found = versions()
    return [
        f"{report.images} images of {report.megapixels:.3f} megapixels and "
        f"{report.kilobytes:.1f} kB in the mean,",
        f"of {shards or _SMALL}.",
        ", ".join(f"{name} {found[name]}" for name in ("torch", "pillow", "simplejpeg", "numba")),
    ]


def _stages(report: Report) -> list[str]:
    """The ceiling of a stage is the speed of loading if there were nothing else."""
    lines = [f"{'stage':38}{'ms':>8}{'up to here':>12}{'ceiling':>10}   images/s of one core"]
    so_far = 0.0
    for name, milliseconds in report.stages.items():
        so_far += milliseconds
        ceiling = f"{1000 / milliseconds:,.0f}" if milliseconds else "-"
        lines.append(f"{_LABELS[name]:38}{milliseconds:8.3f}{1000 / so_far:12,.0f}{ceiling:>10}")
    return lines


def _comparison(report: Report) -> list[str]:
    kernels = "with numba" if report.has_kernels else "numba cannot be imported"
    plain = (
        f"without numba: {_speed(report, 'plain')}, ratio {_ratio(report, 'plain', 'beit')}"
        if report.has_kernels
        else "pip install 'mimkit[fast]' makes it faster, pixel for pixel the same"
    )
    return [
        f"two views, from bytes to pixels, {kernels}: {_speed(report, 'ours')}",
        f"BEiT's own pipeline in Pillow: {_speed(report, 'beit')}",
        f"ratio: {_ratio(report, 'ours', 'beit')}",
        f"decoding alone: {_speed(report, 'decode')}; our share of that: "
        f"{_ratio(report, 'ours', 'decode')}",
        plain,
        f"pixels: at most {report.difference.most} grey levels apart, "
        f"{report.difference.mean:.4f} in the mean. (Pillow 12 resizes across, then down;",
        "  a later one may turn that round, so for this comparison it does so in two calls.)",
    ]


def _speed(report: Report, name: str) -> str:
    median = report.speed(name).median
    return f"{1000 / median:.2f} ms, {median:,.0f} images/s"


def _ratio(report: Report, name: str, to: str) -> str:
    ratio = report.ratio(name, to)
    return f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"
