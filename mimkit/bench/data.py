"""The input pipeline beside BEiT's own in Pillow, and beside decoding alone."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mimkit.batch import Sample, Views
from mimkit.bench.beit import beit_pixels, beit_views
from mimkit.bench.data_stages import time_stages, time_transfer
from mimkit.bench.timing import Spread, one_thread, spread, take_turns
from mimkit.data._kernels import Kernels, load_kernels
from mimkit.data.decode import DecodeError, Pixels, decode_image
from mimkit.data.sources import Source
from mimkit.data.views import TwoViews
from mimkit.errors import UserError
from mimkit.masks.blockwise import Blockwise
from mimkit.random import Purpose, Rng, generator

VIEWS = TwoViews(image_size=224, token_size=112)
MASK = Blockwise(grid=(14, 14), num_masked=75)
MOST, MEAN = 2, 0.01  # grey levels of 255 that our pixels may be from Pillow 12's


@dataclass(frozen=True)
class Difference:
    """Between our pixels and BEiT's, in grey levels of 255."""

    most: int
    mean: float  # of that view which differs more


@dataclass(frozen=True)
class Report:
    """What `measure` found.

    Attributes:
        speeds: images in a second of CPU time, that is of one core, in each round: "ours", "plain"
            (ours without compiled kernels), "beit" (BEiT's pipeline in Pillow) and "decode" alone.
        stages: milliseconds of CPU an image.
    """

    images: int
    megapixels: float
    kilobytes: float
    has_kernels: bool
    difference: Difference
    speeds: dict[str, list[float]]
    stages: dict[str, float]

    def speed(self, name: str) -> Spread:
        return spread(self.speeds[name])

    def ratio(self, name: str, to: str) -> Spread:
        """Of two speeds, by rounds."""
        pairs = zip(self.speeds[name], self.speeds[to], strict=True)
        return spread(one / other for one, other in pairs)

    def cores(self, images_per_second: float) -> float:
        """That load for a GPU of this speed: all stages together."""
        return images_per_second * sum(self.stages.values()) / 1000


def measure(
    source: Source, *, images: int, rounds: int, done: Callable[[], object] = lambda: None
) -> Report:
    """Measures on the first `images` samples of `source`, or on all if there are fewer.

    Args:
        done: called after each of `num_pieces(rounds)` pieces of work.

    Raises:
        UserError: a sample cannot be decoded, or the two pipelines do not give the same pixels, so
            that their speeds cannot be compared.
    """
    samples = [source[index] for index in range(min(images, len(source)))]
    if not samples:
        raise UserError("there is no image to measure with; expected shards that hold some")
    areas = [height * width for height, width, _ in (_decode(s).shape for s in samples)]
    kernels = load_kernels()
    with one_thread():
        difference = _compare(samples, kernels)
        done()
        speeds = _race(samples, kernels, rounds, done)
        stages = []
        for _ in range(rounds):
            stages.append(time_stages(source, VIEWS, MASK, kernels, num=len(samples)))
            done()
        transfer = time_transfer(source, _views(samples[0], kernels))
        done()
    medians = {name: statistics.median(times[name] for times in stages) for name in stages[0]}
    return Report(
        images=len(samples),
        megapixels=statistics.mean(areas) / 1e6,
        kilobytes=statistics.mean(len(sample.image) for sample in samples) / 1e3,
        has_kernels=kernels is not None,
        difference=difference,
        speeds=speeds,
        stages={**medians, "transfer": transfer},
    )


def num_pieces(rounds: int) -> int:
    """Pieces of work of a `measure`: two a round, the comparison of pixels, and transfer."""
    return 2 * rounds + 2


def _decode(sample: Sample) -> Pixels:
    try:
        return decode_image(sample.image)
    except DecodeError as error:
        raise UserError(
            f"sample {sample.index}, key '{sample.key}', in {sample.origin}, cannot be decoded: "
            f"{error}. tools/make_shards.py writes shards without such images"
        ) from error


def _rng(sample: Sample) -> Rng:
    return generator(Purpose.VIEW, seed=0, sample=sample.index)


def _views(sample: Sample, kernels: Kernels | None) -> Views:
    pixels = decode_image(sample.image)
    drawing = VIEWS.draw(pixels.shape[0], pixels.shape[1], _rng(sample))
    return VIEWS.render(pixels, drawing, kernels)


def _compare(samples: Sequence[Sample], kernels: Kernels | None) -> Difference:
    """Over all samples, with kernels and without.

    Raises:
        UserError: they are farther apart than resizing in torch explains.
    """
    apart = np.array([_apart(s, k) for s in samples for k in {kernels, None}])
    found = Difference(int(apart[..., 0].max()), float(apart[..., 1].mean(0).max()))
    if found.most > MOST or found.mean >= MEAN:
        raise UserError(
            f"our pixels are up to {found.most} grey levels from those of BEiT's pipeline in "
            f"Pillow, {found.mean:.4f} in the mean; expected at most {MOST}, and less than {MEAN} "
            "in the mean, or their speeds cannot be compared. This torch or Pillow computes "
            "something else than torch 2.14 and Pillow 12 and 13, with which it was checked"
        )
    return found


def _apart(sample: Sample, kernels: Kernels | None) -> list[tuple[int, float]]:
    """Most and mean grey levels between our view and BEiT's, for both views."""
    pairs = zip(
        _views(sample, kernels), beit_pixels(sample.image, VIEWS, _rng(sample)), strict=True
    )
    levels = [np.abs(our.permute(1, 2, 0).numpy() - np.asarray(its, int)) for our, its in pairs]
    return [(int(view.max()), float(view.mean())) for view in levels]


def _race(
    samples: Sequence[Sample], kernels: Kernels | None, rounds: int, done: Callable[[], object]
) -> dict[str, list[float]]:
    """Images a second of each competitor in each round."""
    competitors: dict[str, Callable[[Sample], object]] = {
        "ours": lambda sample: _views(sample, kernels),
        "plain": lambda sample: _views(sample, None),
        "beit": lambda sample: beit_views(sample.image, VIEWS, _rng(sample)),
        "decode": lambda sample: decode_image(sample.image),
    }
    seconds = take_turns(competitors, samples, rounds=rounds, done=done)
    return {name: [len(samples) / s for s in found] for name, found in seconds.items()}
