"""Learning rate and weight decay as pure functions of the updates done."""

import math


def cosine(fraction: float, start: float, end: float) -> float:
    """Half a cosine from `start` at fraction 0 to `end` at fraction 1, constant outside."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))


def warmup_cosine(step: int, *, steps: int, warmup: int, peak: float, floor: float) -> float:
    """BEiT's schedule: linear from 0 to `peak` in `warmup` steps, then half a cosine to `floor`."""
    if step < warmup:
        return peak * step / max(warmup - 1, 1)
    return cosine((step - warmup) / max(steps - warmup, 1), peak, floor)
