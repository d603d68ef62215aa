"""Ways of doing one thing, timed in turns: what the small benches find."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from mimkit.bench.timing import Spread, clock_of, one_thread, race, ratios, spread


@dataclass(frozen=True)
class Comparison:
    """Seconds of each way in each round, and what else is known about it.

    Attributes:
        base: the way that others are compared with.
        per: what a way's seconds are divided by, an image's for "ms an image".
        columns: name of a column -> way -> number.
        notes: lines for people.
    """

    title: str
    base: str
    per: int
    seconds: Mapping[str, list[float]]
    columns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def milliseconds(self, way: str) -> Spread:
        """Of one of `per`."""
        return spread(1000 * seconds / self.per for seconds in self.seconds[way])

    def time_ratio(self, way: str) -> Spread:
        """Its time over the base's; less is faster."""
        return ratios(self.seconds[way], self.seconds[self.base])


def time_ways(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: torch.device,
    done: Callable[[], object],
) -> dict[str, list[float]]:
    """In one thread, in rotating order; CPU time, or time on the GPU."""
    with one_thread():
        return race(ways, rounds=rounds, clock=clock_of(device), done=done)


def parameter_bytes(model: nn.Module, *, copies: int) -> int:
    """Of everything that trains, `copies` times in float32: its gradient, its two moments."""
    return 4 * copies * sum(p.numel() for p in model.parameters() if p.requires_grad)
