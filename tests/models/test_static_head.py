"""A known number of masked patches: the same rows, and nothing whose shape depends on data."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from mimkit.batch import Batch, at_masked, normalise
from mimkit.bench.workload import GivenTokens
from mimkit.models.attention import aligned, attend, attend_fused
from mimkit.models.encoder import Encoder
from mimkit.models.mim import MaskedImageModel
from mimkit.models.stems import STEMS
from mimkit.train.step import StepResult, mim_step

HALF = (0.5, 0.5, 0.5)


def masks(images: int, patches: int, masked: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    mask_BN = torch.zeros(images, patches, dtype=torch.bool)
    for row in mask_BN:
        row[torch.randperm(patches, generator=draw)[:masked]] = True
    return mask_BN


@pytest.mark.parametrize("masked", [1, 7, 20])
@pytest.mark.parametrize("trailing", [(), (3,)])
def test_rows_and_gradients_are_those_of_the_boolean_mask(masked: int, trailing) -> None:
    mask_BN = masks(5, 20, masked)
    values = torch.randn(5, 20, *trailing, requires_grad=True)
    static, boolean = at_masked(values, mask_BN, masked), at_masked(values, mask_BN)
    assert torch.equal(static, boolean)
    weights = torch.randn(static.shape)
    gradients = [torch.autograd.grad((m * weights).sum(), values)[0] for m in (static, boolean)]
    assert torch.equal(*gradients)


def test_another_number_than_promised_is_an_error() -> None:
    mask_BN = masks(3, 20, 7)
    mask_BN[1, mask_BN[1].nonzero()[0]] = False
    with pytest.raises(RuntimeError, match="not exactly 7 masked patches"):
        at_masked(torch.zeros(3, 20), mask_BN, 7)


def test_losses_do_not_change_by_a_bit(make_model) -> None:
    model, mask_BN = make_model(), masks(2, 6, 3)
    image_BCHW = torch.rand(2, 3, 32, 48)
    assert torch.equal(model(image_BCHW, mask_BN, num_masked=3), model(image_BCHW, mask_BN))


def step(stem: str, device: str, num_masked: int | None) -> StepResult:
    """In fake mode: shapes and devices only, and an error where a value would be asked for."""
    with torch.device(device):
        encoder = Encoder(width=32, heads=2, depth=2, grid=(4, 4), positions="relative_shared")
        model = MaskedImageModel(stem=STEMS[stem](width=32, patch_size=8), encoder=encoder,
                                 prediction_dim=64)  # fmt: skip
        batch = Batch(
            torch.zeros(3, 3, 32, 32, dtype=torch.uint8), torch.zeros(0),
            torch.zeros(3, 16, dtype=torch.bool), torch.zeros(3), torch.zeros(3),
            torch.zeros(3, 16, dtype=torch.int32),
        )  # fmt: skip
    return mim_step(model, GivenTokens(), batch, mean=HALF, std=HALF, keep_LB2R=None,
                    num_masked=num_masked)  # fmt: skip


def test_the_step_asks_for_no_value_of_the_data() -> None:
    with FakeTensorMode():
        step("hmlp", "cpu", 5).loss.backward()
        with pytest.raises(DynamicOutputShapeException):
            step("hmlp", "cpu", None)


@pytest.mark.parametrize("stem", ["linear", "hmlp"])
def test_on_a_gpu_it_asks_for_none_either(stem: str) -> None:
    with FakeTensorMode():
        loss = step(stem, "cuda", 5).loss
        assert loss.device.type == "cuda" and loss.shape == ()
        with pytest.raises(DynamicOutputShapeException):
            step(stem, "cuda", None)


def test_the_fused_attention_of_gpus_computes_the_same_from_an_aligned_bias() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 17, 8, generator=draw) for _ in range(3))
    bias_KNN = torch.randn(3, 17, 17, generator=draw, requires_grad=True)
    ready_KNN = aligned(bias_KNN, dtype=torch.float32)
    assert torch.equal(ready_KNN, bias_KNN)
    assert ready_KNN[None].stride()[-1] == 1
    assert all(stride % 8 == 0 for stride in ready_KNN[None].stride()[:-1])
    found, expected = (
        attend_fused(q, k, v, bias_KNN=ready_KNN), attend(q, k, v, bias_KNN=bias_KNN)
    )  # fmt: skip
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(o.square().sum(), bias_KNN)[0] for o in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_normalising_fills_its_constants_with_the_same_numbers() -> None:
    view_u8 = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = (view_u8.float() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    assert torch.equal(normalise(view_u8, mean=mean, std=std), expected)
