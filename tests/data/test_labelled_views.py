"""Views of a classifier: pure functions of the keys, repeated copies, sizes that are no square."""

import io
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform

from mimkit.batch import Batch
from mimkit.data.labelled_views import AugmentedView, make_policy
from mimkit.data.loader import train_loader
from mimkit.data.order import Order
from mimkit.data.sources.shards import ShardSource
from mimkit.data.views import CenterView, TwoViews
from mimkit.errors import UserError
from mimkit.random import Purpose, generator, seeded_globals

RAND = "rand-m9-mstd0.5-inc1"


def _encoded(height: int = 60, width: int = 80) -> bytes:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([y * 3 % 256, x * 3 % 256, (x + y) % 256], 2).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _view(policy: str | None = RAND, size: tuple[int, int] = (32, 32)) -> AugmentedView:
    made = policy and make_policy(policy, size=size, mean=(0.5,) * 3, interpolation="bicubic")
    return AugmentedView(crop=TwoViews(image_size=size, token_size=None, jitter=0.0), policy=made)


def _rng(sample: int = 0):
    return generator(Purpose.VIEW, seed=0, epoch=1, sample=sample)


@pytest.mark.parametrize("policy", [RAND, "rand-m7-mstd0.5-inc1", "3a", "augmix-m3-w3", "original"])
def test_a_view_depends_on_its_key_alone(policy: str) -> None:
    """Not on the global generators, nor on being sent to a loader process."""
    view, encoded = _view(policy), _encoded()
    random.seed(1)
    first = view(encoded, _rng()).patch_view_CHW
    random.seed(2)
    np.random.seed(2)
    view(encoded, _rng(5))
    again = pickle.loads(pickle.dumps(view))(encoded, _rng()).patch_view_CHW
    assert torch.equal(first, again)
    others = [view(encoded, _rng(sample)).patch_view_CHW for sample in range(1, 4)]
    assert not any(torch.equal(first, other) for other in others)
    assert (first.shape, first.dtype) == ((3, 32, 32), torch.uint8)


def test_the_policy_is_timms_on_the_crop() -> None:
    encoded, rng, same = _encoded(), _rng(), _rng()
    ours = _view()(encoded, rng).patch_view_CHW
    crop = _view(None)(encoded, same).patch_view_CHW
    theirs = rand_augment_transform(RAND, {"translate_const": 14, "img_mean": (128,) * 3,
                                           "interpolation": Image.Resampling.BICUBIC})  # fmt: skip
    with seeded_globals(same):
        expected = theirs(Image.fromarray(crop.permute(1, 2, 0).numpy()))
    assert torch.equal(ours.permute(1, 2, 0), torch.from_numpy(np.array(expected)))


def test_a_policy_that_timm_does_not_know_is_refused() -> None:
    for words in ("rnad-m9", "rand-x9", "augmixx"):
        with pytest.raises(UserError, match=f"data.augment is '{words}'"):
            make_policy(words, size=(32, 32), mean=(0.5,) * 3, interpolation="bicubic")


def test_views_need_not_be_square() -> None:
    assert _view(size=(24, 40))(_encoded(), _rng()).patch_view_CHW.shape == (3, 24, 40)
    judged = CenterView(image_size=(24, 40))(_encoded()).patch_view_CHW
    assert judged.shape == (3, 24, 40)


@pytest.mark.parametrize(("height", "width"), [(60, 80), (80, 60), (41, 40)])
def test_a_judged_view_is_the_middle(height: int, width: int) -> None:
    """Largest central box of the view's shape, and of that the share that is asked for."""
    pixels = np.zeros((height, width, 3), np.uint8)
    size, crop = (16, 24), 0.5
    scale = crop * min(height / 16, width / 24)
    rows, columns = round(16 * scale), round(24 * scale)
    top, left = (height - rows) // 2, (width - columns) // 2
    pixels[top : top + rows, left : left + columns] = 255
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    view = CenterView(image_size=size, crop=crop)(buffer.getvalue()).patch_view_CHW
    assert (view == 255).all()


@pytest.mark.parametrize("repeats", [2, 3])
def test_copies_stand_side_by_side_as_in_deit(repeats: int) -> None:
    """Its RASampler: the first N / R of the shuffled samples, each R times in a row, N in all."""
    groups = np.array([0, 40, 100])
    plain = Order(groups=groups, seed=4, window=1)
    order = Order(groups=groups, seed=4, window=1, repeats=repeats)
    assert len(order) == 100
    for epoch in (0, 1):
        places = [order.locate(epoch * 100 + p) for p in range(100)]
        samples = [place.sample for place in places]
        expected = [plain.locate(epoch * 100 + p // repeats).sample for p in range(100)]
        assert samples == expected
        assert [place.copy for place in places] == [p % repeats for p in range(100)]
        rows = {place.sample + place.copy * 100 for place in places}
        assert len(rows) == 100  # every copy looks different


def test_copies_of_weighted_sets_stay_different() -> None:
    from mimkit.data.order import WeightedSet

    order = Order(groups=np.array([0, 10]), seed=0, window=1, sets=[WeightedSet(0, 10, 2.5)],
                  repeats=2)  # fmt: skip
    places = [order.locate(p) for p in range(len(order))]
    assert len(places) == 25
    assert len({(place.sample, place.copy) for place in places}) == 25
    pairs = [(places[i], places[i + 1]) for i in range(0, 24, 2)]
    assert all(one.sample == two.sample and two.copy == one.copy + 1 for one, two in pairs)


def test_the_stream_goes_on_from_any_position_on_any_ranks(shards) -> None:
    source = ShardSource(shards=str(shards.train))

    def batches(rank: int, world: int, position: int, count: int) -> list[Batch]:
        loader = train_loader(source=source, views=_view(), mask=None, seed=1,
                              batch_size=12 // world, rank=rank, world=world, position=position,
                              window=2, workers=0, repeats=3)  # fmt: skip
        return [batch for _, batch in zip(range(count), loader, strict=False)]

    whole = batches(0, 1, 0, 3)
    later = batches(0, 1, 12, 2)
    for one, other in zip(whole[1:], later, strict=True):
        assert torch.equal(one.patch_view_BCHW, other.patch_view_BCHW)
    halves = [batches(rank, 2, 0, 1)[0] for rank in (0, 1)]
    together = torch.cat([half.patch_view_BCHW for half in halves])
    assert torch.equal(together, whole[0].patch_view_BCHW)
    assert whole[0].index_B.view(4, 3).unique(dim=1).shape == (4, 1)
