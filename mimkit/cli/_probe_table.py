"""What probes found, as text: the data, then for each a table of blocks and poolings, the test."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mimkit.encoder_probes import Answer, ProbeReport


def data_text(report: "ProbeReport") -> str:
    """What is common to all probes."""
    lines = [
        f"{report.encoder}, at {report.image_size} pixels",
        f"{report.train_images} training and {report.test_images} test images, "
        f"{report.classes.num} classes; always naming the most common one: {report.chance:.1%}",
    ]
    if report.shared:
        shown = ", ".join(f"{d.key} (in train: {d.train_key})" for d in report.shared[:3])
        more = ", ..." if len(report.shared) > 3 else ""
        lines.append(f"warning: {len(report.shared)} test images are trained on, byte for byte: "
                     f"{shown}{more}")  # fmt: skip
    lines.append(f"features: {report.seconds['features']:.0f} s")
    return "\n".join(lines)


def probe_text(report: "ProbeReport", name: str) -> str:
    """Of one that was answered."""
    return "\n".join(["", *_probe(name, report.answers[name])])


def _probe(name: str, answer: "Answer") -> Iterator[str]:
    found = answer.selected
    best, seconds = found.best.candidate, found.seconds
    kind = answer.setting
    yield (f"{name}: right of {found.validation_images} images held out of the training split, "
           f"with the best {kind} of each")  # fmt: skip
    yield from _table(answer)
    settings = sorted({tried.candidate.setting for tried in found.table})
    if best.setting in (settings[0], settings[-1]):
        yield f"note: {kind} {best.setting:g} is at the edge of what was tried"
    scores = answer.scores
    five = "" if scores.top5 is None else f", {scores.top5.value:.2%} among the best five"
    yield (f"test: {scores.top1} right{five}; balanced {scores.balanced:.2%}, ECE "
           f"{scores.ece:.3f}, loss {scores.nll:.3f}")  # fmt: skip
    yield (f"  block {best.layer}, {best.pooling}, {kind} {best.setting:g}, learnt from all "
           f"{found.train_images} images; {seconds['choose']:.0f} s to choose, "
           f"{seconds['test']:.0f} s to test")  # fmt: skip


def _table(answer: "Answer") -> Iterator[str]:
    """Of each block and pooling the best setting; a star at the winner."""
    tried, best = answer.selected.table, answer.selected.best.candidate
    cells: dict[tuple[int, str], float] = {}
    for (layer, pooling, _), top1 in tried:
        cells[layer, pooling] = max(top1, cells.get((layer, pooling), 0.0))
    poolings = list(dict.fromkeys(pooling for _, pooling in cells))
    yield "block" + "".join(f"{pooling:>12}" for pooling in poolings)
    for layer in dict.fromkeys(layer for layer, _ in cells):
        row = ""
        for pooling in poolings:
            star = "*" if (layer, pooling) == best[:2] else " "
            row += f"{cells[layer, pooling]:>11.2%}{star}"
        yield f"{layer:5}{row}".rstrip()
