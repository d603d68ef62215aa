"""Bad samples of all ranks are counted in the exchange of the meters, and all stop or none does."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mimkit.errors import ToldByAnotherError, UserError
from mimkit.train.bad_samples import NAME, BadSamples
from mimkit.train.loop import _Report
from mimkit.train.metrics import Meter

CPU = torch.device("cpu")


def _ranks(number: int, *, before: int = 0, allowed: float = 0.01) -> list[BadSamples]:
    return [BadSamples(before=before, allowed=allowed, speaks=rank == 0) for rank in range(number)]


def _exchange(ranks: list[BadSamples], found: list[int], *, drawn: int) -> list[UserError | None]:
    """What each rank says after all have met with what they `found`."""
    for rank, count in zip(ranks, found, strict=True):
        rank.note(count)
    news = sum(float(rank.news(CPU)[NAME][0]) for rank in ranks)
    said: list[UserError | None] = []
    for rank in ranks:
        try:
            rank.settle(news, drawn=drawn)
            said.append(None)
        except UserError as error:
            said.append(error)
    return said


def test_all_ranks_have_the_same_count_and_news_are_told_once() -> None:
    ranks = _ranks(3, before=2)
    _exchange(ranks, [1, 0, 4], drawn=10_000)
    assert [rank.total for rank in ranks] == [7, 7, 7]
    _exchange(ranks, [0, 0, 0], drawn=20_000)
    _exchange(ranks, [0, 2, 0], drawn=30_000)
    assert [rank.total for rank in ranks] == [9, 9, 9]


@pytest.mark.parametrize(
    ("allowed", "before", "found", "drawn", "stops"),
    [
        (0.01, 0, 10, 20, False),  # ten are never too many
        (0.01, 0, 11, 20, True),
        (0.01, 99, 1, 10_000, False),
        (0.01, 99, 2, 10_000, True),
        (0.01, 99, 2, 10_100, False),
        (1.0, 0, 500, 500, False),
        (0.0, 0, 0, 500, False),
        (0.0, 0, 1, 500, True),  # none is allowed
    ],
)
def test_where_it_stops(allowed: float, before: int, found: int, drawn: int, stops: bool) -> None:
    """On every rank, whoever found them; rank 0 tells the numbers and what to set."""
    ranks = _ranks(2, before=before, allowed=allowed)
    said = _exchange(ranks, [0, found], drawn=drawn)
    assert [text is not None for text in said] == [stops, stops]
    if stops:
        assert f"{before + found} of the {drawn} samples drawn so far" in str(said[0])
        assert f"data.max_bad_samples={allowed:g} allows" in str(said[0])
        assert [type(error) for error in said] == [UserError, ToldByAnotherError]


def test_they_cost_no_exchange_of_their_own() -> None:
    shapes: list[tuple[int, ...]] = []

    def sum_over_ranks(sums: Tensor) -> Tensor:
        """Of this rank and another, which met with two bad samples."""
        shapes.append(tuple(sums.shape))
        return sums + torch.tensor([[4.0, 2.0], [2.0, 0.0]]).double()

    meter, runtime = Meter(), SimpleNamespace(sum=sum_over_ranks, device=CPU)
    (bad_samples,) = _ranks(1)
    bad_samples.note(3)
    meter.add({"loss": (torch.tensor(6.0), 2)})
    nothing: Any = None  # plan, recorder and policy are for other lines
    report = _Report(cast(Any, runtime), nothing, nothing, bad_samples, nothing, meter)
    values = report._means(drawn=1000)
    assert values == {"loss": 2.5, NAME: 5}
    assert shapes == [(2, 2)]
