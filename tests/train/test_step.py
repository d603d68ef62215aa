"""The loss: of masked patches only, ln V where nothing is known, a mean over masked tokens."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mimkit.batch import Batch, to_unit
from mimkit.models.encoder import Encoder
from mimkit.models.init import initialise
from mimkit.models.mim import MaskedImageModel
from mimkit.models.stems import STEMS
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer
from mimkit.train.step import StepResult, mim_step

HALF = (0.5, 0.5, 0.5)
V = 64


class _Tokens(VisualTokenizer):
    """Gives the tokens it was made with; the loss is the usual one."""

    def __init__(self, target_BN: Tensor) -> None:
        super().__init__()
        self.target_BN, self.prediction_dim, self.vocabulary = target_BN, V, V
        self.seen: Tensor | None = None

    def encode(self, view_BChw: Tensor) -> Tensor:
        self.seen = view_BChw
        return self.target_BN

    def loss(self, predicted_MV: Tensor, target_M: Tensor) -> Tensor:
        return nn.functional.cross_entropy(predicted_MV.float(), target_M)


def _model() -> MaskedImageModel:
    stem = STEMS["linear"](width=32, patch_size=8)
    encoder = Encoder(width=32, heads=2, depth=1, grid=(4, 4), positions="absolute")
    model = MaskedImageModel(stem=stem, encoder=encoder, prediction_dim=V)
    initialise(model, seed=0)
    return model


def _batch() -> tuple[Batch, Tensor]:
    """Three images with different numbers of masked patches, and their tokens."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 3, 32, 32), generator=draw, dtype=torch.uint8)
    mask_BN = torch.zeros(3, 16, dtype=torch.bool)
    for image, count in enumerate((1, 5, 9)):
        mask_BN[image, torch.randperm(16, generator=draw)[:count]] = True
    target_BN = torch.randint(V, (3, 16), generator=draw)
    return Batch(images, images, mask_BN, torch.zeros(3), torch.arange(3)), target_BN


def _step(model: nn.Module, target_BN: Tensor, batch: Batch) -> StepResult:
    return mim_step(model, _Tokens(target_BN), batch, mean=HALF, std=HALF, keep_LB2R=None)


def test_tokens_of_visible_patches_do_not_matter_and_masked_ones_do() -> None:
    model, (batch, target_BN) = _model(), _batch()
    loss = _step(model, target_BN, batch).loss
    visible = torch.where(batch.mask_BN, target_BN, (target_BN + 1) % V)
    masked = torch.where(batch.mask_BN, (target_BN + 1) % V, target_BN)
    assert torch.equal(_step(model, visible, batch).loss, loss)
    assert not torch.equal(_step(model, masked, batch).loss, loss)


def test_pixels_of_masked_patches_do_not_matter() -> None:
    model, (batch, target_BN) = _model(), _batch()
    loss = _step(model, target_BN, batch).loss
    mask_B1HW = batch.mask_BN.view(3, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
    other = torch.where(mask_B1HW, 255 - batch.patch_view_BCHW, batch.patch_view_BCHW)
    assert not torch.equal(other, batch.patch_view_BCHW)
    assert torch.equal(_step(model, target_BN, batch._replace(patch_view_BCHW=other)).loss, loss)


def test_who_knows_nothing_pays_ln_v() -> None:
    model, (batch, target_BN) = _model(), _batch()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    assert _step(model, target_BN, batch).loss.item() == pytest.approx(math.log(V), abs=1e-6)


def test_the_loss_is_a_mean_over_masked_tokens_and_the_sums_say_how_many() -> None:
    """Not a mean of images' means, which would weigh the image with one masked patch most."""
    model, (batch, target_BN) = _model(), _batch()
    whole = _step(model, target_BN, batch)
    assert whole.sums["loss"][1] == whole.sums["accuracy"][1] == 15
    parts = [
        _step(model, target_BN[i : i + 1], Batch(*(field[i : i + 1] for field in batch)))
        for i in range(3)
    ]
    total = sum(part.loss.item() * part.sums["loss"][1] for part in parts)
    assert whole.loss.item() == pytest.approx(total / 15, abs=1e-5)
    assert float(whole.sums["loss"][0]) == pytest.approx(total, abs=1e-4)


def test_accuracy_counts_the_masked_tokens_that_are_right() -> None:
    model, (batch, target_BN) = _model(), _batch()
    nn.init.zeros_(model.head.weight)
    with torch.no_grad():
        model.head.bias.copy_(torch.nn.functional.one_hot(torch.tensor(3), V).float())
    target_BN = torch.zeros_like(target_BN)
    target_BN[batch.mask_BN] = torch.tensor([3, 3, 3, 3] + [5] * 11)
    correct, count = _step(model, target_BN, batch).sums["accuracy"]
    assert (int(correct), count) == (4, 15)


def test_gradients_reach_every_parameter_and_not_the_tokenizer(tokenizer_file: Path) -> None:
    model, (batch, _) = _model(), _batch()
    tokenizer = TOKENIZERS["dvae"](path=str(tokenizer_file))
    result = mim_step(model, tokenizer, batch, mean=HALF, std=HALF, keep_LB2R=None)
    result.loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    assert all(p.grad is None for p in tokenizer.parameters())


def test_the_tokenizer_sees_the_token_view_in_unit_range() -> None:
    model, (batch, target_BN) = _model(), _batch()
    batch = batch._replace(token_view_BChw=255 - batch.token_view_BChw)
    tokens = _Tokens(target_BN)
    mim_step(model, tokens, batch, mean=HALF, std=HALF, keep_LB2R=None)
    assert tokens.seen is not None
    assert torch.equal(tokens.seen, to_unit(batch.token_view_BChw))
    assert float(tokens.seen.max()) <= 1
