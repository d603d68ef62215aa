"""The doctor of a set of shards: whether training can rely on it, and what there is to know.

It reads and never writes, unpacks nothing, and decodes images as training does: after their size
was checked. What is wrong with one tar is a problem of that tar; the others are examined too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mimkit.audit._shard_doubles import duplicate_contents, leaks
from mimkit.audit._shard_files import ExaminedTar, examine_tar
from mimkit.audit._shard_findings import WARNINGS, Finding, merge
from mimkit.audit._shard_image_facts import image_facts, image_findings
from mimkit.audit._shard_images import Look, choose, look_at
from mimkit.audit._shard_labels import Labels, compare_classes, label_facts, label_findings
from mimkit.audit._shard_records import manifests, missing_tars
from mimkit.audit._shard_samples import Samples, join
from mimkit.audit._shard_shuffle import epoch_facts, shuffle_facts
from mimkit.audit._shard_speed import speed_facts
from mimkit.audit.shards_report import Against, ShardReport, TarFacts
from mimkit.data.patterns import expand_shards
from mimkit.errors import UserError

Progress = Callable[[str, int, int], None]
_TIMED = 200  # images


@dataclass(frozen=True, eq=False)
class _Split:
    tars: list[ExaminedTar]
    samples: Samples
    looks: list[Look]

    @property
    def decoded(self) -> list[int]:
        return [number for number, look in enumerate(self.looks) if look.of_pixels]

    def findings(self) -> Iterator[Finding]:
        yield from manifests([tar.path for tar in self.tars])
        yield from missing_tars([tar.path for tar in self.tars])
        yield from (finding for tar in self.tars for finding in tar.findings)
        yield from self.samples.duplicate_keys()


def examine(
    shards: str | Sequence[str],
    *,
    against: str | Sequence[str] | None = None,
    window: int = 8,
    batch: int = 2048,
    ranks: int = 1,
    seed: int = 0,
    view: int = 224,
    sample: int | None = None,
    cache_dir: Path = Path("~/.cache/mimkit"),
    progress: Progress = lambda stage, done, total: None,
) -> ShardReport:
    """Examines the tars that `shards` names, see `expand_shards`.

    Args:
        against: another split, which should share no image with this one.
        window: data.window, tars that are shuffled together.
        batch: images of an update, over all `ranks`.
        seed: of the order, and of the images that are drawn.
        view: side of the encoder's view in pixels; the tokenizer's is half of it.
        sample: how many images of each split to decode; None decodes all. All are read.
        cache_dir: where indexes of read-only folders lie.
        progress: called with what is done ("tars" or "images"), how many, and of how many.

    Raises:
        UserError: the patterns name nothing, or one tar in both splits.
    """
    paths = expand_shards(shards)
    other_paths = expand_shards(against) if against is not None else []
    _refuse_common(paths, other_paths)
    tars = _examine_tars([*paths, *other_paths], cache_dir.expanduser(), progress)
    main, other = _look_at([tars[: len(paths)], tars[len(paths) :]], sample, seed, progress)
    samples, labels = main.samples, label_facts(main.samples)
    shuffle = shuffle_facts(samples, window=window, batch=batch, seed=seed) if labels else None
    common = list(leaks(samples, main.looks, other.samples, other.looks))
    findings = [
        *main.findings(),
        *image_findings(samples, main.looks, view=view),
        *(label_findings(samples, labels) if labels else ()),
        *duplicate_contents(samples, main.looks),
        *_uneven(main.tars),
        *(shuffle.findings(samples) if shuffle else ()),
        *_other_findings(main, other, view=view),
        *common,
    ]
    return ShardReport(
        problems=tuple(f for f in findings if f.kind not in WARNINGS),
        warnings=tuple(merge(f for f in findings if f.kind in WARNINGS)),
        samples=len(samples),
        decoded=len(main.decoded),
        sample=sample,
        tars=_tar_facts(main.tars, labels),
        images=image_facts(samples, main.looks),
        labels=labels,
        shuffle=shuffle,
        epoch=epoch_facts(len(samples), batch=batch, ranks=ranks),
        speed=speed_facts(samples, _spread_out(main.decoded), view=view, seed=seed),
        against=_against(other, common) if other_paths else None,
    )


def _refuse_common(paths: Sequence[Path], other_paths: Sequence[Path]) -> None:
    common = {path.resolve() for path in paths} & {path.resolve() for path in other_paths}
    if common:
        raise UserError(
            f"{min(common)} is among the shards and also in --against: every image of it would be "
            "in both splits; give --against the other split"
        )


def _examine_tars(paths: Sequence[Path], cache_dir: Path, progress: Progress) -> list[ExaminedTar]:
    tars = []
    for path in paths:
        tars.append(examine_tar(path, cache_dir=cache_dir))
        progress("tars", len(tars), len(paths))
    return tars


def _look_at(
    splits: Sequence[list[ExaminedTar]], sample: int | None, seed: int, progress: Progress
) -> list[_Split]:
    all_samples = [join(tars) for tars in splits]
    total, done = sum(map(len, all_samples)), 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress("images", done, total)

    return [
        _Split(tars, samples, look_at(samples, choose(samples, most=sample, seed=seed), done=tick))
        for tars, samples in zip(splits, all_samples, strict=True)
    ]


def _other_findings(main: _Split, other: _Split, *, view: int) -> Iterator[Finding]:
    """Problems of the other split, and where the two name their classes differently."""
    yield from (f for f in other.findings() if f.kind not in WARNINGS)
    images = image_findings(other.samples, other.looks, view=view)
    yield from (f for f in images if f.kind not in WARNINGS)
    folders = dict.fromkeys(tar.path.parent for tar in [*main.tars, *other.tars])
    yield from compare_classes(list(folders))


def _against(other: _Split, common: Sequence[Finding]) -> Against:
    return Against(
        tars=sum(tar.is_sound for tar in other.tars),
        samples=len(other.samples),
        decoded=len(other.decoded),
        in_both=sum(finding.kind not in WARNINGS for finding in common),
    )


def _uneven(tars: Sequence[ExaminedTar]) -> Iterator[Finding]:
    """Tars with more than three times, or less than a third of, the images of the median."""
    sound = [tar for tar in tars if tar.is_sound]
    median = float(np.median([len(tar.images) for tar in sound])) if sound else 0.0
    for tar in sound:
        if not median / 3 <= len(tar.images) <= 3 * median:
            detail = f"more than three times the median of {median:,.0f} images, or below a third"
            yield Finding("uneven_shards", str(tar.path), detail=detail)


def _tar_facts(tars: Sequence[ExaminedTar], labels: Labels | None) -> tuple[TarFacts, ...]:
    tops = iter(zip(labels.most_frequent, labels.most_share, strict=True) if labels else ())
    return tuple(
        TarFacts(str(tar.path), len(tar.images), tar.num_bytes, tar.checksum, tar.index,
                 *(next(tops, (None, None)) if tar.is_sound else (None, None)))
        for tar in tars
    )  # fmt: skip


def _spread_out(numbers: Sequence[int]) -> list[int]:
    """At most so many as are timed, at even distances."""
    step = max(1, len(numbers) // _TIMED)
    return list(numbers[::step][:_TIMED])
