"""Ranks as threads of one process, for what only sums over ranks."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Sum = Callable[[Tensor], Tensor]


def on_ranks(world: int, work: Callable[[int, Sum], Result]) -> list[Result]:
    """What `work(rank, sum_over_ranks)` gives on each of `world` ranks at once."""
    barrier, parts, results = threading.Barrier(world), dict[int, Tensor](), dict[int, Result]()

    def summing(rank: int) -> Sum:
        def add(tensor: Tensor) -> Tensor:
            parts[rank] = tensor
            barrier.wait()
            total = torch.stack([parts[other] for other in sorted(parts)]).sum(0)
            barrier.wait()
            return total

        return add

    def run(rank: int) -> None:
        results[rank] = work(rank, summing(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(world)), "a rank ended with an error"
    return [results[rank] for rank in range(world)]
