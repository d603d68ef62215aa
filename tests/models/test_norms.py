"""Batch norm over ranks against one big batch, its statistics in float32; LayerNorm in place."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from mimkit.models.norms import BatchNorm2d, ChannelLayerNorm

CHANNELS, RANKS = 5, 2
SHARES = (slice(0, 5), slice(5, 8))  # ranks may hold different numbers of images


def features(scale: float = 3.0, shift: float = 10.0) -> torch.Tensor:
    """A large mean beside a small spread: one pass of sums of squares would lose its digits."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(8, CHANNELS, 6, 4, generator=draw) * scale + shift


def train_step(norm: nn.Module, input_BCHW: torch.Tensor, weights_BCHW: torch.Tensor):
    """Two forward passes and a backward: output, gradients and running statistics."""
    norm.train()
    norm(input_BCHW * 0.5)
    input_BCHW = input_BCHW.clone().requires_grad_()
    output_BCHW = norm(input_BCHW)
    (output_BCHW.sin() * weights_BCHW).sum().backward()
    return {
        "output": output_BCHW.detach(),
        "input_grad": input_BCHW.grad,
        "weight_grad": norm.weight.grad,
        "bias_grad": norm.bias.grad,
        "mean": norm.running_mean,
        "var": norm.running_var,
        "batches": norm.num_batches_tracked,
    }


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    share = SHARES[rank]
    got = train_step(BatchNorm2d(CHANNELS), features()[share], features(1.0, 0.0)[share])
    torch.save(got, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one_big_batch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(folder,), nprocs=RANKS)
        got = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]
    expected = train_step(
        nn.BatchNorm2d(CHANNELS).double(), features().double(), features(1.0, 0.0)
    )
    for name in ("output", "input_grad"):
        both = torch.cat([rank[name] for rank in got]).double()
        torch.testing.assert_close(both, expected[name], rtol=0, atol=2e-6)
    for name in ("weight_grad", "bias_grad"):
        total = sum(rank[name] for rank in got).double()
        torch.testing.assert_close(total, expected[name], rtol=1e-5, atol=1e-4)
    for name in ("mean", "var"):
        assert torch.equal(got[0][name], got[1][name])
        torch.testing.assert_close(got[0][name].double(), expected[name], rtol=1e-6, atol=0)
    assert got[0]["batches"] == got[1]["batches"] == 2


def test_one_process_is_torchs_batch_norm() -> None:
    got = train_step(BatchNorm2d(CHANNELS), features(), features(1.0, 0.0))
    expected = train_step(nn.BatchNorm2d(CHANNELS), features(), features(1.0, 0.0))
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_statistics_are_float32_under_bf16() -> None:
    exact, mixed = BatchNorm2d(CHANNELS), BatchNorm2d(CHANNELS)
    rounded_BCHW = features().bfloat16()
    exact(rounded_BCHW.float())
    with torch.autocast("cpu", torch.bfloat16):
        output_BCHW = mixed(rounded_BCHW)
    assert output_BCHW.dtype == torch.bfloat16
    assert mixed.running_mean.dtype == torch.float32
    assert torch.equal(mixed.running_mean, exact.running_mean)
    assert torch.equal(mixed.running_var, exact.running_var)


def test_running_statistics_survive_a_cast_of_the_module() -> None:
    norm = BatchNorm2d(CHANNELS)
    norm(features())
    before = norm.running_mean.clone()
    norm.bfloat16()
    assert norm.weight.dtype == torch.bfloat16
    assert torch.equal(norm.running_mean, before)
    assert norm(features().bfloat16()).dtype == torch.bfloat16


def test_channel_layer_norm_is_over_channels_at_each_position() -> None:
    norm = ChannelLayerNorm(CHANNELS)
    input_BCHW = features(1.0, 0.0)
    output_BCHW = norm(input_BCHW)
    torch.testing.assert_close(output_BCHW.mean(1), torch.zeros(8, 6, 4), atol=1e-6, rtol=0)
    changed_BCHW = input_BCHW.clone()
    changed_BCHW[:, :, 2, 1] = torch.arange(float(CHANNELS))
    moved_HW = (norm(changed_BCHW) != output_BCHW).any(0).any(0)
    assert moved_HW.nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_tokens_are_right_for_a_single_image(images: int, training: bool) -> None:
    """torch 2.14's own batch norm fails this for one image on a CPU: 178 % off in training."""
    input_BCHW = torch.rand(images, 8, 5, 5, dtype=torch.float64)
    weights_BND = torch.rand(images, 25, 8)
    grads = []
    for norm in (BatchNorm2d(8).train(training), _PlainFormula().train(training)):
        leaf_BCHW = input_BCHW.to(torch.float32).requires_grad_()
        (norm(leaf_BCHW).flatten(2).transpose(1, 2) * weights_BND).sum().backward()
        grads.append(leaf_BCHW.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


class _PlainFormula(nn.Module):
    def forward(self, input_BCHW: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return input_BCHW / (1 + 1e-5) ** 0.5
        mean_C = input_BCHW.mean((0, 2, 3), keepdim=True)
        variance_C = input_BCHW.var((0, 2, 3), keepdim=True, unbiased=False)
        return (input_BCHW - mean_C) * torch.rsqrt(variance_C + 1e-5)


@pytest.mark.parametrize("channels", [1, 8])
def test_eval_uses_the_running_statistics(channels: int) -> None:
    norm = BatchNorm2d(channels).eval()
    input_BCHW = torch.rand(2, channels, 3, 3)
    torch.testing.assert_close(norm(input_BCHW), input_BCHW / (1 + 1e-5) ** 0.5)
