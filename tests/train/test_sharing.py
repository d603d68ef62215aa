"""What one rank finds wrong stops all, and one speaks; a checkpoint that only the first machine has
reaches every rank whole."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mimkit.errors import ToldByAnotherError, UserError
from mimkit.train import checkpoint
from mimkit.train.runtimes import Runtime
from mimkit.train.sharing import load_everywhere, told_once


class _Exchange:
    """What the ranks, here threads, say to each other: everyone's word, to everyone."""

    def __init__(self, world: int) -> None:
        self.barrier, self.words = threading.Barrier(world, timeout=20), [None] * world
        self.times = 0

    def all(self, rank: int, word: Any) -> list[Any]:
        self.words[rank] = word
        self.barrier.wait()
        heard = list(self.words)
        self.times += rank == 0
        self.barrier.wait()
        return heard


class _Rank:
    def __init__(self, exchange: _Exchange, rank: int) -> None:
        self._exchange, self.rank = exchange, rank

    def any(self, flag: bool) -> bool:
        return any(self._exchange.all(self.rank, flag))

    def from_rank_0(self, value: Any) -> Any:
        return self._exchange.all(self.rank, value)[0]

    def gather(self, value: Any) -> list[Any]:
        return self._exchange.all(self.rank, value)


def _saved(folder: Path, *, average: bool) -> Path:
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(3, 2, generator=draw) for name in ("a", "b")}
    moments = {f"{name}/exp_avg": torch.randn(3, 2, generator=draw) for name in weights}
    whole = checkpoint.Checkpoint(
        updates=7, position=59, weights=weights, moments=moments, bad_samples=2, nonfinite=1,
        applied=6, average=dict(weights) if average else None,
    )  # fmt: skip
    return checkpoint.save(folder, whole, keep=1).path


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_every_rank_has_the_whole_checkpoint(shared: bool, average: bool, tmp_path: Path) -> None:
    path, exchange = _saved(tmp_path, average=average), _Exchange(3)
    paths = [path, path if shared else tmp_path / "not here", path]
    with ThreadPoolExecutor(3) as pool:
        ranks = [cast(Runtime, _Rank(exchange, rank)) for rank in range(3)]
        found = list(pool.map(load_everywhere, paths, ranks))
    assert (exchange.times == 1) == shared  # where all see it, nothing is sent
    alone = checkpoint.load(path)
    for one in found:
        for name in ("updates", "position", "bad_samples", "nonfinite", "applied"):
            assert getattr(one, name) == getattr(alone, name)
        assert (one.average is None) == (not average)
        for ours, theirs in ((one.weights, alone.weights), (one.moments, alone.moments),
                             (one.average or {}, alone.average or {})):  # fmt: skip
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([None, None, None], [None, None, None]),
        (["a", "a", "a"], ["a", "told: a", "told: a"]),
        ([None, "b", "c"], ["told: b", "b", "told: b"]),  # who found nothing ends as well
    ],
)
def test_what_ranks_find_wrong_one_of_them_says(
    wrong: list[str | None], said: list[str | None]
) -> None:
    exchange = _Exchange(3)

    def check(number: int) -> str | None:
        try:
            with told_once(cast(Runtime, _Rank(exchange, number))):
                if (text := wrong[number]) is not None:
                    raise UserError(text)
        except ToldByAnotherError as error:
            return f"told: {error}"
        except UserError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(check, range(3))) == said
