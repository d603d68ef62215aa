"""The share of the tokenizer in a step, against a tokenizer that takes a known time."""

import pytest
import torch
from torch import Tensor

from mimkit.tokenizers import VisualTokenizer
from mimkit.train import watched_tokenizer
from mimkit.train.watched_tokenizer import WatchedTokenizer


class Slow(VisualTokenizer):
    patch, prediction_dim, vocabulary, fingerprint = 8, 16, 16, "slow"

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.calls, self.now = seconds, 0, 100.0

    def perf_counter(self) -> float:
        return self.now

    def encode(self, view_BChw: Tensor) -> Tensor:
        self.calls += 1
        self.now += self.seconds
        return torch.zeros(len(view_BChw), 16, dtype=torch.int64)


def test_the_share_is_that_of_a_known_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(seconds=0.02)
    monkeypatch.setattr(watched_tokenizer, "time", slow)
    watched = WatchedTokenizer(slow)
    for _ in range(6):
        assert watched.encode(torch.zeros(4, 3, 32, 32)).shape == (4, 16)
    # 5 ms an image; at 100 images a second and two ranks an image takes a rank 20 ms
    assert watched.seconds_an_image() == pytest.approx(0.005)
    assert watched.share(images_per_second=100, world=2) == pytest.approx(0.25)
    assert watched.share(images_per_second=100, world=1) == pytest.approx(0.5)
    assert watched.share(images_per_second=1e6, world=1) == 1
    assert watched.share(images_per_second=None, world=1) is None


def test_it_is_the_tokenizer_it_watches_and_stops_timing() -> None:
    slow = Slow()
    watched = WatchedTokenizer(slow)
    assert watched.share(images_per_second=100, world=1) is None
    for _ in range(1000):
        watched.encode(torch.zeros(1, 3, 32, 32))
    assert slow.calls == 1000 and len(watched._seconds_an_image) == 64
    predicted_MV, target_M = torch.randn(5, 16), torch.arange(5)
    assert torch.equal(watched.loss(predicted_MV, target_M), slow.loss(predicted_MV, target_M))
    assert (watched.vocabulary, watched.fingerprint) == (16, "slow")
