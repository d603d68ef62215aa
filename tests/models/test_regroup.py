"""A sequential encoder as a parallel one: the same weights, moved by a second-order error."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.autograd.functional import jvp

from mimkit.errors import UserError
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.regroup import movement, regroup
from mimkit.models.roles import role_of
from mimkit.models.stems import STEMS


def make_model(**settings) -> ImageEncoder:
    """Every parameter has values of its own, so that none can stand for another."""
    encoder = Encoder(**{"width": 32, "heads": 4, "depth": 6, "grid": (2, 3), **settings})
    model = ImageEncoder(STEMS["linear"](width=32), encoder)
    initialise(model, seed=0)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model.eval()


def with_gamma(model: ImageEncoder, gamma: float) -> ImageEncoder:
    """A double-precision copy: the movements of small gammas are below float32's rounding."""
    scaled = copy.deepcopy(model).double()
    for name, parameter in scaled.named_parameters():
        if name.endswith("ls.gamma"):
            nn.init.constant_(parameter, gamma)
    return scaled


def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 48, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("positions", ["absolute", "relative_shared", "none"])
@pytest.mark.parametrize("branches", [1, 2, 3, 6])
def test_every_weight_has_one_place_in_the_copy(positions: str, branches: int) -> None:
    model = make_model(positions=positions)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grouped = regroup(model, branches=branches)
    assert (grouped.encoder.depth, grouped.encoder.branches) == (6 // branches, branches)
    after = grouped.state_dict()
    assert len(after) == len(before)
    for name, value in before.items():
        if name.startswith("encoder.blocks."):
            _, _, block, kind, branch, rest = name.split(".", 5)
            assert branch == "0"
            number, branch = divmod(int(block), branches)
            name = f"encoder.blocks.{number}.{kind}.{branch}.{rest}"  # noqa: PLW2901
        assert torch.equal(after.pop(name), value), name
    assert not after
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    shared = {p.data_ptr() for p in model.parameters()} & {
        p.data_ptr() for p in grouped.parameters()
    }
    assert not shared


def test_the_copy_is_what_the_configuration_would_build() -> None:
    """So it goes wherever a parallel encoder goes: roles, exports, load_state_dict."""
    grouped = regroup(make_model(), branches=2)
    built = make_model(depth=3, branches=2)
    assert role_of(grouped) == role_of(built)
    built.load_state_dict(grouped.state_dict())
    assert torch.equal(built(images()), grouped(images()))
    assert not torch.allclose(built(images()), make_model()(images()), atol=1e-3)


@pytest.mark.parametrize("positions", ["absolute", "relative", "relative_shared", "none"])
def test_one_branch_is_the_same_model(positions: str) -> None:
    model = make_model(positions=positions)
    same = regroup(model, branches=1)
    assert torch.equal(same(images()), model(images()))
    assert [row[1:] for row in movement(model, same, images())] == [(0.0, 0.0)] * 6


def test_movement_is_the_share_of_a_tokens_norm_after_the_same_blocks() -> None:
    model = make_model()
    grouped = regroup(model, branches=3)
    rows = movement(model, grouped, images())
    assert [row.block for row in rows] == [1, 2]
    olds, news = model.intermediates(images(), [3, 6]), grouped.intermediates(images(), [1, 2])
    for row, old_BND, new_BND in zip(rows, olds, news, strict=True):
        pairs = zip(old_BND.flatten(0, 1).tolist(), new_BND.flatten(0, 1).tolist(), strict=True)
        shares = [math.dist(new_D, old_D) / math.hypot(*old_D) for old_D, new_D in pairs]
        assert len(shares) == 4 * 7
        assert row.mean == pytest.approx(sum(shares) / len(shares), rel=1e-4)
        assert row.max == pytest.approx(max(shares), rel=1e-4)
        assert 0.01 < row.mean < row.max


def test_smaller_residuals_move_tokens_less_and_by_the_square() -> None:
    model, gammas = make_model(), [1e-1, 1e-2, 1e-3, 1e-4]
    moved = []
    for gamma in gammas:
        scaled = with_gamma(model, gamma)
        moved.append(movement(scaled, regroup(scaled, branches=2), images().double()))
    for block in range(3):
        sizes = [rows[block].mean for rows in moved]
        assert sizes[0] > sizes[1] > sizes[2] > sizes[3] > 0
        assert sizes[2] / sizes[3] == pytest.approx(100, rel=0.01)
    assert moved[3][-1].max < 1e-6


def test_the_movement_is_the_second_order_term_of_the_two_orders() -> None:
    """With residuals gamma A, gamma F of two blocks, in powers of gamma (x: the tokens before):

    one after the other, minus side by side
        = gamma^2 (A2'[A1 + F1] + F2'[F1] - F1'[A2]) + O(gamma^3), all at x.

    Both have A1 + F1 + A2 + F2 to the first order; a part that reads x moved by gamma u adds
    gamma^2 part'[u], and A2 reads x behind A1 and F1 in the one order, plain x in the other.
    """
    gamma, model = 1e-4, with_gamma(make_model(depth=2), 1.0)
    parts = [(block.attns[0], block.ffns[0]) for block in model.encoder.blocks]
    (attend_1, mlp_1), (attend_2, mlp_2) = [
        (lambda x, a=attn: a(x, bias_KNN=None), mlp) for attn, mlp in parts
    ]
    x_BND = model.encoder._embed(model.stem(images().double()))
    a1_BND, f1_BND, a2_BND = attend_1(x_BND), mlp_1(x_BND), attend_2(x_BND)
    expected_BND = (
        jvp(attend_2, x_BND, a1_BND + f1_BND)[1]
        + jvp(mlp_2, x_BND, f1_BND)[1]
        - jvp(mlp_1, x_BND, a2_BND)[1]
    )
    small = with_gamma(model, gamma)
    with torch.no_grad():
        one_after_other_BND = small.intermediates(images().double(), [2])[0]
        side_by_side_BND = regroup(small, branches=2).intermediates(images().double(), [1])[0]
    got_BND = (one_after_other_BND - side_by_side_BND) / gamma**2
    assert (got_BND - expected_BND).norm() / expected_BND.norm() < 0.01


@pytest.mark.parametrize(
    ("settings", "branches", "message"),
    [
        ({}, 4, r"6 blocks do not make groups of 4; regroup by one of 1, 2, 3, 6$"),
        ({}, 12, "6 blocks do not make groups of 12"),
        ({}, 0, "6 blocks do not make groups of 0"),
        ({"branches": 2}, 2, r"has 2 branches a block.*encoder\.branches=1"),
        ({"positions": "relative"}, 2, r"encoder\.positions is relative: each block has its own"),
    ],
)
def test_what_cannot_be_regrouped_is_refused(settings, branches: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        regroup(make_model(**settings), branches=branches)
