"""What `mimkit bench scaling` prints (Markdown, as docs/scaling.md has it) and writes."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mimkit.bench.scaling import (
    Figures,
    Run,
    ablation_hours,
    bank_gigabytes,
    scale,
    slowdown,
)

SIZES, GPUS, EPOCHS = ("Ti", "S", "B", "L"), (8, 16, 32, 64), (300, 800)
_UNITS = {
    "teraflops": (1, "TFLOP/s of a GPU in the step"),
    "network": (1e-9, "GB/s of a GPU between machines"),
    "link": (1e-9, "GB/s of a GPU within a machine"),
    "data_seconds": (1e3, "ms of a core to load an image"),
    "jpeg_bytes": (1e-3, "kB of a stored image"),
}


def as_text(figures: Figures, sources: Mapping[str, str], *, batch: int) -> str:
    """Markdown: figures with where they come from, then tables."""
    runs = _runs(figures, batch)
    return "\n".join([
        "| figure | value | |", "|---|---|---|",
        *(f"| {word} | {getattr(figures, name) * factor:.4g} | {sources[name]} |"
          for name, (factor, word) in _UNITS.items()),
        "",
        "Hours of ImageNet-1k, ideal: tokens from a bank / DALL-E's tokenizer in every step.", "",
        "| ViT | epochs | images/s/GPU | " + " | ".join(f"{n} GPUs" for n in GPUS) + " |",
        "|---|---|---|" + "---|" * len(GPUS),
        *(_hours(runs, size, epochs) for size in SIZES for epochs in EPOCHS),
        "",
        f"An update of {batch} images: computing / exchange of gradients, ms; and what is lost if "
        "two thirds of the computing hide the exchange.", "",
        "| ViT | " + " | ".join(f"{n} GPUs" for n in GPUS) + " |", "|---|" + "---|" * len(GPUS),
        *(_updates(runs, size) for size in SIZES),
        "",
        "A machine of 8 GPUs must be given:", "",
        "| ViT | images/s | GB/s of JPEG | cores that load |", "|---|---|---|---|",
        *(_node(runs[size, 8]) for size in SIZES),
        "",
        f"A token bank (counted): {bank_gigabytes(1):.2f} GB an epoch, "
        + ", ".join(f"{bank_gigabytes(n):.0f} GB for {n} epochs" for n in EPOCHS) + ".",
        "",
        *_ablation(runs),
    ])  # fmt: skip


def as_numbers(figures: Figures, sources: Mapping[str, str], *, batch: int) -> dict[str, Any]:
    """For programs."""
    runs = [{**asdict(run), "slowdown": slowdown(run)} for run in _runs(figures, batch).values()]
    banks = {str(epochs): bank_gigabytes(epochs) for epochs in EPOCHS}
    return {"figures": asdict(figures), "sources": dict(sources), "runs": runs,
            "bank_gigabytes": banks}  # fmt: skip


def _runs(figures: Figures, batch: int) -> dict[tuple[str, int], Run]:
    return {(size, gpus): scale(size, gpus, figures=figures, epochs=EPOCHS, batch=batch)
            for size in SIZES for gpus in GPUS}  # fmt: skip


def _hours(runs: Mapping[tuple[str, int], Run], size: str, epochs: int) -> str:
    found = [runs[size, gpus] for gpus in GPUS]
    cells = (f"{r.hours[epochs]:.1f} / {r.hours_with_tokenizer[epochs]:.1f}" for r in found)
    rates = f"{found[0].images_per_second:.0f} / {found[0].with_tokenizer:.0f}"
    return f"| {size} | {epochs} | {rates} | " + " | ".join(cells) + " |"


def _updates(runs: Mapping[tuple[str, int], Run], size: str) -> str:
    found = [runs[size, gpus] for gpus in GPUS]
    cells = (f"{r.compute_ms:.0f} / {r.exchange_ms:.0f} ({slowdown(r):.2f} x)" for r in found)
    return f"| {size} | " + " | ".join(cells) + " |"


def _node(run: Run) -> str:
    rate = 8 * run.images_per_second
    return f"| {run.size} | {rate:.0f} | {run.jpeg_gigabytes:.1f} | {run.cores:.0f} |"


def _ablation(runs: Mapping[tuple[str, int], Run]) -> list[str]:
    beside, after = ablation_hours(runs["B", 8], runs["B", 64], jobs=8, epochs=EPOCHS[0])
    return [f"Eight runs of ViT-B, {EPOCHS[0]} epochs: side by side on 8 GPUs each {beside:.1f} h, "
            f"one after the other on all 64 {after:.1f} h."]  # fmt: skip
