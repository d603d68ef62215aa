"""Erasing and mixing on the device: timm's, drawn by row and group, on any number of ranks."""

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup
from torch import Tensor, nn

from mimkit.batch import Batch
from mimkit.errors import UserError
from mimkit.random import Purpose, generator, seeded_globals
from mimkit.train.classification_step import classification_step, make_loss, predict_all
from mimkit.train.mixing import Mixing

CLASSES = 5


def _mixing(**settings) -> Mixing:
    return Mixing(**{"num_classes": CLASSES, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1,
                     "group": 4, "erasing": 0.5, "seed": 3, **settings})  # fmt: skip


def _images() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(16, 3, 12, 10, generator=draw), torch.arange(16) % CLASSES


def test_ranks_and_accumulation_do_not_change_what_is_mixed() -> None:
    images, labels = _images()
    whole, shares = _mixing()(images.clone(), labels, update=7, rows=slice(0, 16))
    for size in (4, 8):
        parts = [_mixing()(images[i : i + size].clone(), labels[i : i + size], update=7,
                           rows=slice(i, i + size)) for i in range(0, 16, size)]  # fmt: skip
        assert torch.equal(torch.cat([part[0] for part in parts]), whole)
        assert torch.equal(torch.cat([part[1] for part in parts]), shares)
    other, _ = _mixing()(images.clone(), labels, update=8, rows=slice(0, 16))
    assert not torch.equal(other, whole)


def test_a_group_is_what_timm_makes_of_it() -> None:
    images, labels = _images()
    ours, shares = _mixing(erasing=0.0)(images.clone(), labels, update=2, rows=slice(0, 16))
    mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    with seeded_globals(generator(Purpose.MIX, seed=3, epoch=2, sample=1)):
        theirs, expected = mix(images[4:8].clone(), labels[4:8])
    assert torch.equal(ours[4:8], theirs)
    assert torch.equal(shares[4:8], expected)
    torch.testing.assert_close(shares.sum(1), torch.ones(16))


def test_erasing_takes_its_share_of_the_images() -> None:
    images = torch.zeros(400, 3, 8, 8)
    labels = torch.zeros(400, dtype=torch.long)
    mixing = _mixing(mixup=0.0, cutmix=0.0, erasing=0.25)
    erased, target = mixing(images, labels, update=0, rows=slice(0, 400))
    share = erased.flatten(1).any(1).double().mean().item()
    assert share == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 400) ** 0.5)
    noise = erased[erased != 0]
    assert noise.mean().item() == pytest.approx(0, abs=0.05)
    assert noise.std().item() == pytest.approx(1, abs=0.05)  # of normalised pixels, as in BEiT
    assert target is labels


def test_global_generators_are_left_as_they_were() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(1)
    np.random.seed(1)
    images, labels = _images()
    _mixing()(images, labels, update=0, rows=slice(0, 16))
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(3) == expected[1]).all()


@pytest.mark.parametrize(("micro", "remedy"), [(6, "for example 6"), (7, "an odd number")])
def test_rows_that_are_no_whole_groups_are_refused(micro: int, remedy: str) -> None:
    with pytest.raises(UserError, match=rf"no multiple of train\.mix_group=4; .*{remedy}"):
        _mixing().check(micro_batch=micro)
    _mixing().check(micro_batch=8)
    _mixing(mixup=0.0, cutmix=0.0).check(micro_batch=micro)


def _batch(images: int, *, first: int = 0, padding: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(first)
    pixels = torch.randint(256, (images + padding, 3, 4, 4), generator=draw, dtype=torch.uint8)
    index = torch.cat([torch.arange(first, first + images), torch.full((padding,), -1)])
    return Batch(pixels, torch.empty(0), torch.empty(0), index.clamp(0) % CLASSES, index)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(48, CLASSES)

    def forward(self, image_BCHW: Tensor, keep_LB2R: Tensor | None = None) -> Tensor:
        return self.linear(image_BCHW.flatten(1))


PIXELS = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


@pytest.mark.parametrize("name", ["cross_entropy", "bce"])
@pytest.mark.parametrize("mixed", [True, False])
def test_the_losses_are_their_formulas(name: str, mixed: bool) -> None:
    alphas = {} if mixed else {"mixup": 0.0, "cutmix": 0.0}
    mixing = _mixing(erasing=0.0, **alphas)
    model, batch = _Model(), _batch(8)
    loss = make_loss(name, mixing=mixing, threshold=None)
    result = classification_step(model, batch, loss=loss, mixing=mixing, update=1,
                                 rows=slice(0, 8), keep_LB2R=None, **PIXELS)  # fmt: skip
    images = (batch.patch_view_BCHW / 255 - 0.5) / 0.5
    images, target = mixing(images, batch.label_B, update=1, rows=slice(0, 8))
    if not mixed:
        target = nn.functional.one_hot(batch.label_B, CLASSES) * 0.9 + 0.1 / CLASSES
    logits = model(images)
    entropy = -(target * logits.log_softmax(1)).sum(1).mean()
    binary = nn.functional.binary_cross_entropy_with_logits(logits, target)
    expected = entropy if name == "cross_entropy" else binary
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-6)
    total, count = result.sums["loss"]
    assert count == 8 and total.item() == pytest.approx(8 * expected.item(), rel=1e-5)


def test_a_threshold_makes_every_mixed_class_present() -> None:
    """DeiT's `targets.gt(0)`."""
    mixing = _mixing(smoothing=0.0)
    loss = make_loss("bce", mixing=mixing, threshold=0.0)
    share = torch.tensor([[0.7, 0.3, 0.0]])
    logits = torch.tensor([[0.2, -0.4, 0.9]])
    expected = nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor([[1.0, 1.0, 0]]))
    torch.testing.assert_close(loss(logits, share), expected)


def test_predictions_of_two_ranks_are_put_together_and_padding_is_dropped() -> None:
    model = _Model()
    batches = [_batch(4), _batch(4, first=4), _batch(3, first=8, padding=1)]
    settings = {"images": 11, "best": 3, "device": torch.device("cpu"), **PIXELS}
    whole = predict_all(model, batches, sum_over_ranks=lambda t: t, **settings)
    parts: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        parts.append(tensor)
        return tensor

    for mine in ([batches[0], batches[2]], [batches[1]]):
        predict_all(model, mine, sum_over_ranks=keep, **settings)
    together = predict_all(model, [], sum_over_ranks=lambda _: parts[0] + parts[1], **settings)
    for one, other in zip(whole, together, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        logits = torch.cat([model((b.patch_view_BCHW / 255 - 0.5) / 0.5) for b in batches])[:11]
    assert torch.equal(whole.best_NK[:, 0], logits.argmax(1))
    label_N = torch.arange(11) % CLASSES
    expected = logits.log_softmax(1)[torch.arange(11), label_N]
    torch.testing.assert_close(whole.log_probability_N, expected)
    assert model.training
