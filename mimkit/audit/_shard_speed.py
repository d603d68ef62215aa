"""How many images a second one core reads, decodes, and makes the two views of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mimkit.audit._shard_samples import Samples
from mimkit.bench.timing import cpu_seconds, one_thread
from mimkit.data.decode import decode_image
from mimkit.data.views import TwoViews
from mimkit.random import Purpose, generator

_ROUNDS = 3


@dataclass(frozen=True)
class Speed:
    """Images a second of CPU time, that is of one core; of several rounds the fastest.

    Attributes:
        images: that were measured.
        view, token_view: sides of the two views, in pixels.
        decode: read and decode.
        views: read, decode, and make both views, as a loader process does.
    """

    images: int
    view: int
    token_view: int
    decode: float
    views: float


def speed_facts(samples: Samples, numbers: Sequence[int], *, view: int, seed: int) -> Speed | None:
    """Of the images `numbers`, which must be sound; None without any."""
    if not numbers:
        return None
    make_views = TwoViews(image_size=view, token_size=max(1, view // 2))

    def views(number: int) -> object:
        rng = generator(Purpose.VIEW, seed=seed, sample=number)
        return make_views(samples.read(number), rng)

    with one_thread():
        views(numbers[0])  # compiles what is compiled at first use
        return Speed(
            images=len(numbers),
            view=view,
            token_view=max(1, view // 2),
            decode=_speed(lambda number: decode_image(samples.read(number)), numbers),
            views=_speed(views, numbers),
        )


def _speed(work: Callable[[int], object], numbers: Sequence[int]) -> float:
    rounds = []
    for _ in range(_ROUNDS):
        before = cpu_seconds()
        for number in numbers:
            work(number)
        rounds.append(cpu_seconds() - before)
    return len(numbers) / max(min(rounds), 1e-9)
