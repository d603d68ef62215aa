"""What each stage of loading costs, in milliseconds of CPU an image."""

import resource
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, pairwise

from mimkit.batch import Views
from mimkit.bench.timing import cpu_seconds
from mimkit.data._kernels import Kernels
from mimkit.data.decode import decode_image
from mimkit.data.loader import BatchLoader, train_loader
from mimkit.data.sources import Source
from mimkit.data.views import TwoViews
from mimkit.masks import Mask
from mimkit.random import Purpose, Rng, generator

STAGES = ("read", "decode", "draw", "jitter", "resize", "mask")
_BATCH, _FEW, _MANY = 64, 4, 20  # the two lengths of which the difference is taken


def time_stages(
    source: Source, views: TwoViews, mask: Mask, kernels: Kernels | None, *, num: int
) -> dict[str, float]:
    """The mean over the first `num` samples, for each of `STAGES`."""
    totals = dict.fromkeys(STAGES, 0.0)
    for index in range(num):
        marks = [cpu_seconds()]
        sample = source[index]
        marks.append(cpu_seconds())
        pixels = decode_image(sample.image)
        marks.append(cpu_seconds())
        rng = generator(Purpose.VIEW, seed=0, sample=index)
        drawing = views.draw(pixels.shape[0], pixels.shape[1], rng)
        marks.append(cpu_seconds())
        crop = views.crop(pixels, drawing, kernels)
        marks.append(cpu_seconds())
        views.resize(crop, kernels)
        marks.append(cpu_seconds())
        mask(generator(Purpose.MASK, seed=0, sample=index))
        marks.append(cpu_seconds())
        for stage, (before, after) in zip(STAGES, pairwise(marks), strict=True):
            totals[stage] += 1000 * (after - before) / num
    return totals


@dataclass(frozen=True)
class _Ready:
    """Makes no views: gives those it has."""

    views: Views

    def __call__(self, encoded: bytes, rng: Rng) -> Views:
        return self.views


def time_transfer(source: Source, views: Views) -> float:
    """Through a loader process, minus the same in this process without batches.

    So it is stacking, shared memory, and what sender and receiver do; with views that are ready,
    as their making would drown it. Starting a process is no part of it: two lengths are compared.
    """
    loader = train_loader(
        source=source, views=_Ready(views), mask=None, seed=0, batch_size=_BATCH, rank=0, world=1,
        position=0, window=1, workers=1,
    )  # fmt: skip
    _cpu_of(lambda: _receive(loader, 1))
    more = _cpu_of(lambda: _receive(loader, _MANY)) - _cpu_of(lambda: _receive(loader, _FEW))
    through_process = more / (_BATCH * (_MANY - _FEW))

    def here() -> None:
        for number in range(_BATCH):
            index = number % len(source)
            _Ready(views)(source[index].image, generator(Purpose.VIEW, seed=0, sample=index))

    return 1000 * max(0.0, through_process - _cpu_of(here) / _BATCH)


def _receive(loader: BatchLoader, num_batches: int) -> None:
    for _ in islice(loader, num_batches):
        pass


def _cpu_of(work: Callable[[], None]) -> float:
    """CPU seconds of this process and of the children that `work` starts and ends."""
    before = cpu_seconds() + _of_children()
    work()
    return cpu_seconds() + _of_children() - before


def _of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
