"""Groups by layer and by decay, for AdamW and LAMB, and their learning rates."""

import pytest
import torch
from timm.optim import Lamb
from torch import nn

from mimkit.train.optimizer import make_optimizer, set_learning_rate

SCALES = {"0.weight": 0.25, "0.bias": 0.25, "1.weight": 0.5, "1.bias": 0.5, "2.weight": 1.0,
          "2.bias": 1.0}  # fmt: skip


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def _made(model: nn.Module, name: str = "adamw") -> torch.optim.Optimizer:
    return make_optimizer(model, decays=lambda n, _: n.endswith("weight"), weight_decay=0.1,
                          betas=(0.9, 0.99), eps=1e-8, name=name, scales=SCALES)  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_every_layer_has_its_rate_and_weights_alone_decay(name: str) -> None:
    optimizer = _made(_model(), name)
    set_learning_rate(optimizer, 0.8)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
        (0.8, 0.1, 1), (0.8, 0.0, 1), (0.4, 0.1, 1), (0.4, 0.0, 1), (0.2, 0.1, 1), (0.2, 0.0, 1),
    ]  # fmt: skip
    set_learning_rate(optimizer, 0.4)  # of the rate that is set, not of the one before
    assert optimizer.param_groups[-1]["lr"] == pytest.approx(0.1)


def test_frozen_parameters_are_in_no_group() -> None:
    model = _model()
    model[0].requires_grad_(False)
    optimizer = _made(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}
    assert len(optimizer.param_groups) == 4


def test_lamb_is_timms_and_does_not_clip_by_itself() -> None:
    """A gradient 1000 times as long makes the same step: LAMB's own clipping would change it."""
    ends = []
    for factor in (1.0, 1000.0):
        model = _model()
        optimizer = _made(model, "lamb")
        assert isinstance(optimizer, Lamb)
        set_learning_rate(optimizer, 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(1, 3)).square().sum() * factor).backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
