"""The report of the doctor of shards for a person: the verdict first."""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mimkit.audit._shard_findings import REMEDIES, Finding
from mimkit.audit._shard_image_facts import ImageFacts, Spread
from mimkit.audit._shard_labels import Labels
from mimkit.audit._shard_shuffle import Epoch, Shuffle
from mimkit.audit._shard_speed import Speed
from mimkit.audit.shards_report import Against, ShardReport, TarFacts

_LISTED = 20  # problems
_ROWS = 10  # tars
_WIDTH = 100
_CHANCE = 0.01


def say(report: ShardReport) -> str:
    """Verdict, problems, warnings, then what there is to know."""
    report, folder = _shorten(report)
    lines = [
        *_wrap(_verdict(report, folder)),
        *_problems(report),
        *_warnings(report.warnings),
        "",
        *_facts(report),
        "",
        *_table(report.tars, report.labels),
    ]
    return "\n".join(_printable(line) for line in lines)


def _shorten(report: ShardReport) -> tuple[ShardReport, str]:
    """Without the folder that all tars of the set lie in; and that folder, "" if there are more."""
    folders = {str(Path(tar.path).parent) for tar in report.tars}
    folder = folders.pop() if len(folders) == 1 else ""
    beginning = "" if folder in ("", ".") else folder.rstrip("/") + "/"

    def short(finding: Finding) -> Finding:
        return replace(
            finding,
            shard=finding.shard.removeprefix(beginning),
            detail=finding.detail.replace(f" {beginning}", " ") if beginning else finding.detail,
        )

    shortened = replace(
        report,
        problems=tuple(map(short, report.problems)),
        warnings=tuple(map(short, report.warnings)),
        tars=tuple(replace(t, path=t.path.removeprefix(beginning)) for t in report.tars),
    )
    return shortened, folder


def _printable(text: str) -> str:
    """Names in a tar are anybody's: none may send commands to the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _verdict(report: ShardReport, folder: str) -> str:
    where = f" of {folder}" if folder else ""
    found = f"{_count(report.samples, 'image')} in {_count(len(report.tars), 'tar')}{where}"
    if report.fit:
        return f"fit: {found}, no problem, {_count(len(report.warnings), 'warning')}"
    kinds = Counter(problem.kind for problem in report.problems)
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    return f"not fit: {_count(len(report.problems), 'problem')} ({listed}); {found}"


def _problems(report: ShardReport) -> Iterator[str]:
    """The first twenty in full, of every kind at least one; then how many more there are."""
    shown = defaultdict[str, list[Finding]](list)
    for number, problem in enumerate(report.problems):
        if number < _LISTED or problem.kind not in shown:
            shown[problem.kind].append(problem)
    kinds = Counter(problem.kind for problem in report.problems)
    for kind, count in kinds.items():
        yield ""
        yield from _wrap(
            f"{kind} ({count:,})" + (f": {REMEDIES[kind]}" if kind in REMEDIES else "")
        )
        for problem in shown[kind]:
            yield from _wrap(f"{_place(problem)}: {problem.detail}", indent="  ")
        if count > len(shown[kind]):
            yield f"  ... and {count - len(shown[kind]):,} more; --json FILE lists all"


def _warnings(warnings: Sequence[Finding]) -> Iterator[str]:
    if warnings:
        yield ""
        yield "warnings"
    for warning in warnings:
        first = "first: " if warning.count > 1 else ""
        place = f" ({first}{_place(warning)})"
        yield from _wrap(f"{warning.count:,} {warning.kind}: {warning.detail}{place}", indent="  ")


def _place(finding: Finding) -> str:
    key = f", {finding.key!r}" if finding.key else ""
    offset = f" at byte {finding.offset}" if finding.offset is not None else ""
    return f"{finding.shard}{key}{offset}"


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ",
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _facts(report: ShardReport) -> Iterator[str]:
    facts = [
        ("checked", _checked(report)),
        ("other split", _against(report.against)),
        ("images", _images(report.images)),
        ("labels", _labels(report.labels)),
        ("shuffle", _shuffle(report.shuffle)),
        ("epoch", _epoch(report.epoch)),
        ("speed", _speed(report.speed)),
    ]
    for name, text in facts:
        yield from textwrap.wrap(text, _WIDTH, initial_indent=f"{name:13}", break_long_words=False,
                                 subsequent_indent=" " * 13, break_on_hyphens=False)  # fmt: skip


def _checked(report: ShardReport) -> str:
    sums = sum(tar.checksum != "none" for tar in report.tars)
    indexes = sum(tar.index != "none" for tar in report.tars)
    drawn = "" if report.sample is None else " (drawn by --seed)"
    return (
        f"{_count(len(report.tars), 'tar')}: headers and end blocks; {sums:,} SHA-256 sums of "
        f"manifest.json; {indexes:,} index files. {_count(report.samples, 'image')}: bytes "
        f"compared with each other; decoded {report.decoded:,} of {report.samples:,}{drawn}, and "
        "their pixels compared"
    )


def _against(against: Against | None) -> str:
    if against is None:
        return "not given; --against PATTERN finds images that are in both"
    shared = f"{against.in_both:,} are in both" if against.in_both else "none is in both"
    return (
        f"{_count(against.samples, 'image')} in {_count(against.tars, 'tar')}, decoded "
        f"{against.decoded:,}; by their bytes and pixels, {shared}"
    )


def _images(images: ImageFacts | None) -> str:
    if images is None:
        return "none whose header can be read"
    total = images.with_header

    def shares(counts: dict[str, int]) -> str:
        return ", ".join(f"{name} {count / total:.1%}" for name, count in counts.items())

    return (
        f"{_spread(images.width)} x {_spread(images.height)} pixels (smallest / median / largest), "
        f"{_spread(images.megapixels, '.2f')} megapixels, {_spread(images.kilobytes, ',.1f')} kB, "
        f"{images.bytes / 1e6:,.1f} MB in all; {shares(images.formats)}; {shares(images.modes)}"
    )


def _spread(spread: Spread, form: str = ",.0f") -> str:
    numbers = [format(number, form) for number in (spread.least, spread.median, spread.most)]
    return numbers[0] if len(set(numbers)) == 1 else " / ".join(numbers)


def _labels(labels: Labels | None) -> str:
    if labels is None:
        return "none"
    counts = labels.counts
    least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    text = f"{len(counts):,}, from {_count(counts[least], 'image')} of {_named(least, labels)} to "
    text += f"{counts[most]:,} of {_named(most, labels)}"
    if counts[least] == counts[most]:
        text = f"{len(counts):,}, of each {_count(counts[most], 'image')}"
    if labels.same_everywhere is None:
        return text
    spread = "as chance would" if labels.same_everywhere >= _CHANCE else "unevenly"
    return f"{text}; the tars divide them {spread} (chi-square p = {labels.same_everywhere:.2g})"


def _named(label: int, labels: Labels) -> str:
    in_range = 0 <= label < len(labels.names)
    return f"{label} ({labels.names[label]})" if in_range else str(label)


def _shuffle(shuffle: Shuffle | None) -> str:
    if shuffle is None:
        return "cannot be judged without labels of two kinds and batches of two"
    tars = _count(shuffle.num_tars, "tar")
    window = f"{shuffle.window} of {tars}" if shuffle.window < shuffle.num_tars else f"all {tars}"
    return (
        f"a window of {window} mixes {min(1, shuffle.mixed):.0%}: two images of a batch share "
        f"their label in {shuffle.same_label:.1%} of cases, in a full shuffle in "
        f"{shuffle.same_label_at_random:.1%}; data.window={shuffle.sufficient_window} suffices"
    )


def _epoch(epoch: Epoch) -> str:
    return (
        f"{epoch.updates:,.2f} updates of {_count(epoch.batch, 'image')} "
        f"({_count(epoch.ranks, 'rank')} x {epoch.per_rank:,}): {epoch.whole:,} whole, and "
        f"{_count(epoch.left_over, 'image')} left over, which the next update takes together with "
        f"images of the next epoch; train.epochs=100 makes {max(1, round(100 * epoch.updates)):,} "
        "updates"
    )


def _speed(speed: Speed | None) -> str:
    if speed is None:
        return "no image was decoded"
    return (
        f"one core reads and decodes {speed.decode:,.0f} images/s, and makes both views of "
        f"{speed.views:,.0f} images/s ({speed.view} and {speed.token_view} pixels; CPU time over "
        f"{_count(speed.images, 'image')})"
    )


def _table(tars: Sequence[TarFacts], labels: Labels | None) -> list[str]:
    rows = [("tar", "images", "MB", "SHA-256", "index", "most frequent label")]
    for tar in tars[:_ROWS]:
        top = ""
        if labels is not None and tar.most_frequent is not None and tar.most_share is not None:
            top = f"{tar.most_share:.1%} {_named(tar.most_frequent, labels)}"
        rows.append((tar.path, f"{tar.samples:,}" if tar.samples else "damaged",
                     f"{tar.bytes / 1e6:,.1f}", tar.checksum, tar.index, top))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(_cells(row, widths)).rstrip() for row in rows]
    if len(tars) > _ROWS:
        lines.append(f"... {_count(len(tars) - _ROWS, 'more tar')}; --json FILE lists all")
    return lines


def _cells(row: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if column in (1, 2) else cell.ljust(width)
