"""oneDNN's products equal torch's, forward and backward; names and exports do not change."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mimkit.models import matmul
from mimkit.models.matmul import OneDnnLinear, has_onednn, onednn_linear, probe_matmul, use_onednn

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


def inputs(*shape: int, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, 24, generator=draw), torch.randn(40, 24, generator=draw)]
    last = torch.randn(40, generator=draw) if bias else None
    return (*(t.requires_grad_() for t in given), last if last is None else last.requires_grad_())


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients_are_torchs(shape: tuple[int, ...], bias: bool) -> None:
    found = []
    for product in (functional.linear, onednn_linear):
        given = inputs(*shape, bias=bias)
        output = product(*given)
        (output * torch.arange(40) * output.detach().cos()).sum().backward()
        found.append([output.detach(), *(t.grad for t in given if t is not None)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


def test_it_reads_inputs_that_lie_crosswise() -> None:
    input_RI, weight_OI, _ = inputs(24)
    crosswise = input_RI.detach().t()
    assert not crosswise.is_contiguous()
    expected = functional.linear(crosswise, weight_OI)
    torch.testing.assert_close(onednn_linear(crosswise, weight_OI), expected)


def test_what_does_not_train_gets_no_gradient() -> None:
    input_RI, weight_OI, bias_O = inputs(7)
    onednn_linear(input_RI, weight_OI.detach(), bias_O).sum().backward()
    assert input_RI.grad is not None and weight_OI.grad is None


def test_under_autocast_it_is_torchs() -> None:
    given = inputs(7)
    with torch.autocast("cpu", torch.bfloat16):
        found = onednn_linear(*given)
        assert found.dtype == torch.bfloat16 and torch.equal(found, functional.linear(*given))


def test_a_model_gives_the_same_and_keeps_its_names(make_model) -> None:
    model = make_model(positions="relative_shared")
    twin = copy.deepcopy(model)
    use_onednn(twin)
    assert list(twin.state_dict()) == list(model.state_dict())
    linear = {name for name, m in twin.named_modules() if isinstance(m, OneDnnLinear)}
    assert linear == {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    image_BCHW, mask_BN = torch.rand(2, 3, 32, 48), torch.tensor([[True, False] * 3] * 2)
    for one in (model, twin):
        one(image_BCHW, mask_BN).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 1e-5 * one.grad.norm(), name


@pytest.mark.parametrize(("factor", "expected"), [(1.1, "torch"), (1.9, "onednn")])
def test_the_probe_takes_what_is_clearly_faster(monkeypatch, factor: float, expected: str) -> None:
    """By a clock that runs as if oneDNN had `factor` times torch's speed."""
    clock = iter([t for _ in range(6) for t in (factor, 1.0)])
    monkeypatch.setattr(matmul, "_cpu_seconds", lambda work: next(clock))
    assert probe_matmul() == (expected, pytest.approx(factor))


def test_the_probe_measures_both() -> None:
    chosen, speed = probe_matmul()
    assert speed > 0.05 and chosen == ("onednn" if speed >= 1.4 else "torch")
