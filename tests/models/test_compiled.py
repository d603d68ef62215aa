"""Compiled blocks compute the same, once for all of them, and change no name."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from mimkit.errors import UserError
from mimkit.models import compiled
from mimkit.models.blocks import draw_keep
from mimkit.models.compiled import check_compiler, compile_blocks
from mimkit.models.encoder import Encoder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_blocks_are_one_graph_with_the_same_gradients() -> None:
    check_compiler(torch.device("cpu"))
    encoder = Encoder(width=32, heads=2, depth=3, grid=(2, 3), positions="relative_shared")
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    twin = copy.deepcopy(encoder)
    counters.clear()
    compile_blocks(twin)
    tokens_BND = torch.randn(4, 6, 32)
    keep_LB2R = draw_keep([0, 0.3, 0.6], batch=4, generator=torch.Generator().manual_seed(0))
    for one in (encoder, twin):
        one(tokens_BND, keep_LB2R).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert list(twin.state_dict()) == list(encoder.state_dict())
    for (name, one), other in zip(encoder.named_parameters(), twin.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 2e-5 * one.grad.norm(), name


def test_without_a_compiler_it_says_so_at_once(monkeypatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"compile=block needs a C\+\+ compiler"):
        check_compiler(torch.device("cpu"))
