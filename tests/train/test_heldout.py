"""Held-out loss: every image once, and the lines it is judged by in closed form."""

import math
from pathlib import Path

import pytest
import torch
from threaded_ranks import Sum, on_ranks
from torch import Tensor, nn

from mimkit.batch import Batch, to_unit
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer
from mimkit.train.blind import FOLDS, STRENGTHS
from mimkit.train.heldout import evaluate, mean_losses

PIXELS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "device": torch.device("cpu")}


class _Frequencies(nn.Module):
    """A model that always predicts the same distribution."""

    def __init__(self, logits_V: Tensor) -> None:
        super().__init__()
        self.logits_V = logits_V

    def forward(
        self,
        image_BCHW: Tensor,
        mask_BN: Tensor,
        keep_LB2R: Tensor | None,
        num_masked: int | None,
    ) -> Tensor:
        return self.logits_V.expand(int(mask_BN.sum()), -1)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> VisualTokenizer:
    return TOKENIZERS["dvae"](path=str(tokenizer_file))


def _batch(seed: int, index_B: list[int]) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    size = (len(index_B), 3, 32, 32)
    images = torch.randint(0, 256, size, generator=draw, dtype=torch.uint8)
    mask_BN = torch.rand(len(index_B), 16, generator=draw).argsort(dim=1) < 6
    return Batch(images, images, mask_BN, torch.zeros(len(index_B)), torch.tensor(index_B))


def _targets(tokenizer: VisualTokenizer, batches: list[Batch]) -> Tensor:
    return torch.cat([tokenizer.encode(to_unit(b.token_view_BChw))[b.mask_BN] for b in batches])


def test_guessing_by_frequency_costs_the_unigram_entropy(tokenizer: VisualTokenizer) -> None:
    batches = [_batch(0, [0, 1, 2]), _batch(1, [3, 4, 5])]
    counts_V = torch.bincount(
        _targets(tokenizer, batches), minlength=tokenizer.prediction_dim
    ).float()
    model = _Frequencies((counts_V / counts_V.sum()).clamp_min(1e-30).log())
    values = evaluate(model, tokenizer, batches, sum_over_ranks=lambda t: t, **PIXELS)
    assert values["heldout_loss"] == pytest.approx(values["unigram_entropy"], rel=1e-5)
    assert values["heldout_accuracy"] == pytest.approx(values["most_common_token"])
    assert values["ln_vocab"] == pytest.approx(math.log(tokenizer.prediction_dim))
    assert values["tokens_used"] == int((counts_V > 0).sum())
    # noise has no positions, and six images tell little about 64 words
    assert values["unigram_entropy"] < values["position_loss"] < values["ln_vocab"] + 0.5
    assert model.training  # back in the mode that training needs


def test_padding_is_not_counted(tokenizer: VisualTokenizer) -> None:
    whole = [_batch(0, [0, 1, 2, 3])]
    padded = [_batch(0, [0, 1, 2, -1])]
    draw = torch.Generator().manual_seed(5)
    model = _Frequencies(torch.randn(tokenizer.prediction_dim, generator=draw))
    got = evaluate(model, tokenizer, padded, sum_over_ranks=lambda t: t, **PIXELS)
    first = Batch(*(field[:3] for field in whole[0]))
    expected = evaluate(model, tokenizer, [first], sum_over_ranks=lambda t: t, **PIXELS)
    assert got == pytest.approx(expected)
    other = evaluate(model, tokenizer, whole, sum_over_ranks=lambda t: t, **PIXELS)
    assert got["heldout_loss"] != pytest.approx(other["heldout_loss"], rel=1e-6)


def test_a_rank_with_padding_only_joins_the_sums_with_nothing(tokenizer: VisualTokenizer) -> None:
    """What two ranks exchange has one shape, and adds up to what one rank would get."""
    exchanged: list[list[Tensor]] = []

    def record(tensor: Tensor) -> Tensor:
        exchanged[-1].append(tensor.clone())
        return tensor

    model = _Frequencies(torch.linspace(0, 1, tokenizer.prediction_dim))
    for indexes in ([0, 1], [-1, -1]):
        exchanged.append([])
        try:
            evaluate(model, tokenizer, [_batch(0, indexes)], sum_over_ranks=record, **PIXELS)
        except ZeroDivisionError:
            assert indexes == [-1, -1]  # alone, this rank has nothing to take a mean of
    assert exchanged[0][0].shape == exchanged[1][0].shape
    assert not exchanged[1][0].any()


NUMBERS = {"pixels": {"patch": 8, "normalise": "none", "loss": "mse"}, "hog": {"patch": 8}}


def _mean_losses(name: str, batches: list[Batch], sum_over_ranks: Sum) -> dict[str, float]:
    tokenizer = TOKENIZERS[name](**NUMBERS[name])
    return mean_losses(tokenizer, lambda: batches, device=torch.device("cpu"),
                       sum_over_ranks=sum_over_ranks)  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_judged_by_their_means(name: str) -> None:
    """The mean costs the variance; by position, images are predicted from those of other folds."""
    batches = [_batch(seed, list(range(5 * seed, 5 * seed + 5))) for seed in range(3)]
    got = _mean_losses(name, batches, lambda tensor: tensor)
    tokenizer = TOKENIZERS[name](**NUMBERS[name])
    target_MV = _targets(tokenizer, batches).double()
    variance = target_MV.var(dim=0, unbiased=False).mean()
    assert got["mean_target_loss"] == pytest.approx(float(variance), rel=1e-5)

    image_M, position_M = torch.cat([batch.mask_BN for batch in batches]).nonzero(as_tuple=True)
    fold_M, losses = image_M % FOLDS, []
    for strength in STRENGTHS:
        errors = []
        for row in range(len(target_MV)):
            other_M = fold_M != fold_M[row]
            there_KV = target_MV[other_M & (position_M == position_M[row])]
            guess_V = there_KV.sum(0) + strength * target_MV[other_M].mean(0)
            guess_V = guess_V / (len(there_KV) + strength)
            errors.append((guess_V - target_MV[row]).square().mean())
        losses.append(float(torch.stack(errors).mean()))
    assert got["mean_by_position_loss"] == pytest.approx(min(losses), rel=1e-5)
    if name == "pixels":  # noise has no positions, save for HOG, which sees the borders
        assert got["mean_by_position_loss"] > got["mean_target_loss"]


def test_what_depends_on_its_position_alone_is_predicted_by_it() -> None:
    """256 equal images: each has many others that say all, and the mean of all is far away."""
    one = _batch(0, [0])
    batches = [one._replace(index_B=torch.tensor([number])) for number in range(256)]
    got = _mean_losses("pixels", batches, lambda tensor: tensor)
    assert got["mean_by_position_loss"] < 1e-4 * got["mean_target_loss"]


def test_means_of_two_ranks_with_padding_are_those_of_one() -> None:
    batches = [_batch(0, [0, 1, 2, 3]), _batch(1, [4, 5, 6, -1])]
    whole = _mean_losses("pixels", batches, lambda tensor: tensor)
    parts = [[batches[0], _batch(2, [-1, -1])],
             [batches[1], _batch(3, [-1, -1])]]  # fmt: skip
    for got in on_ranks(2, lambda rank, add: _mean_losses("pixels", parts[rank], add)):
        assert got == pytest.approx(whole, rel=1e-12)
