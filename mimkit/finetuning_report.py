"""What a finetuning did, for somebody who has never seen one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def report(summary: dict[str, Any], folder: Path, *, delta_of: str | None) -> str:
    """The last lines of a run.

    Args:
        delta_of: `init`, where the best weights are kept as what differs from it.
    """
    return "\n".join(["", *_lines(summary, folder), _next(folder, delta_of)])


def _next(folder: Path, delta_of: str | None) -> str:
    if delta_of is None:
        return f'Next: mimkit evaluate {folder} DATA; mimkit.load_encoder("{folder}")'
    return (f"Next: mimkit merge {folder} {delta_of} OUT; then mimkit evaluate OUT DATA; "
            'mimkit.load_encoder("OUT")')  # fmt: skip


def _lines(s: dict[str, Any], folder: Path) -> Iterator[str]:
    speed = f" at {s['images_per_second']:.0f} images/s" if s["images_per_second"] else ""
    yield f"Done: {s['steps']} steps{speed}; {s['peak_memory_mib']} MiB at most."
    yield from _scores(s)
    yield "What moved, of parameters and running statistics:"
    for kind, row in s["moved"].items():
        far = "" if not row["moved"] else (
            ", from zero" if row["distance"] is None
            else f", by {row['distance']:.2%} of their size"
        )  # fmt: skip
        yield f"  {kind:10} {row['moved']:>12,} of {row['numbers']:>12,}{far}"
    if found := s.get("heldout_images_trained_on"):
        yield (f"WARNING: about {found} of the {s['heldout_images']:.0f} held-out images were "
               "trained on; they are in the scores above, and tell nothing about images that were "
               "not.")  # fmt: skip
    if found := s.get("test_images_trained_on"):
        yield f"WARNING: about {found} of the test images were trained on."
    yield (f"Everything is in {folder}: summary.json, metrics.jsonl, checkpoints/, and the best "
           "weights in best/.")  # fmt: skip


def _scores(s: dict[str, Any]) -> Iterator[str]:
    if s["best_top1"] is None:
        yield "No held-out images (data.heldout is null): the last weights are kept as best/."
    else:
        yield (
            f"Held out, {s['heldout_images']:.0f} images: {_accuracy(s, 'heldout')} after the last "
            f"update; the best was {s['best_top1']:.2%} after update {s['best_update']}, which is "
            "kept in best/."
        )
    if "test_top1" in s:
        yield f"Test, {s['test_images']:.0f} images, looked at once: {_accuracy(s, 'test')}."
    elif s["best_top1"] is not None:
        yield ("No data.test: the best score was chosen on the images that it is about, and "
               "flatters a little.")  # fmt: skip


def _accuracy(s: dict[str, Any], split: str) -> str:
    low, high = s[f"{split}_top1_low"], s[f"{split}_top1_high"]
    five = f", {s[f'{split}_top5']:.2%} among the best five" if f"{split}_top5" in s else ""
    return (f"{s[f'{split}_top1']:.2%} right (95 % interval {low:.2%} to {high:.2%}, of images "
            f"alone){five}, loss {s[f'{split}_loss']:.3f}")  # fmt: skip
