"""What only a GPU can show: `pytest -m gpu`; tools/check_gpu.sh runs it with the rest."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mimkit.batch import Batch
from mimkit.bench.optimizer import FOREACH, LOOP, OURS, measure_optimizer
from mimkit.bench.our_step import OurUpdate
from mimkit.bench.step import prove
from mimkit.bench.workload import Workload, make_model, make_workload
from mimkit.models.attention import aligned, attend_fused
from mimkit.models.compiled import check_compiler, compile_blocks
from mimkit.models.matmul import multiplies_bf16
from mimkit.models.mim import MaskedImageModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
CUDA = torch.device("cuda")


@pytest.fixture
def model() -> MaskedImageModel:
    return make_model("Ti")


@pytest.fixture(scope="module")
def work() -> Workload:
    return make_workload(8, device=CUDA)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_step_is_beits(model: MaskedImageModel, work: Workload, bf16: bool) -> None:
    """Fused attention, static head and autocast, against the plain formula on the same GPU."""
    if bf16 and not multiplies_bf16(CUDA):
        pytest.skip("this GPU does not multiply bf16")
    torch.backends.cuda.matmul.allow_tf32 = False
    assert prove(model, copy.deepcopy(model), work, bf16=bf16).gradients > 0


def test_nothing_in_the_step_waits_for_the_gpu(model: MaskedImageModel, work: Workload) -> None:
    update = OurUpdate(model, work, bf16=True)
    update()  # allocates, chooses kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert update.meter.means(lambda sums: sums)["loss"] > 0


def test_the_memory_efficient_kernel_takes_the_aligned_bias() -> None:
    q, k, v = (torch.randn(2, 3, 197, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))  # fmt: skip
    table_KNN = torch.randn(3, 197, 197, device=CUDA, requires_grad=True)
    bias_KNN = aligned(table_KNN, dtype=torch.bfloat16)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):  # an error if it does not
        attend_fused(q, k, v, bias_KNN=bias_KNN).float().square().sum().backward()
    assert table_KNN.grad is not None and table_KNN.grad.abs().sum() > 0


def test_fused_adamw_is_the_loop_and_not_slower() -> None:
    found = measure_optimizer("S", device=CUDA, rounds=5)  # raises where weights differ
    assert set(found.seconds) == {LOOP, FOREACH, OURS}
    assert found.time_ratio(OURS).median < 1


def test_compiled_blocks_give_the_same(model: MaskedImageModel, work: Workload) -> None:
    check_compiler(CUDA)
    twin = copy.deepcopy(model)
    compile_blocks(twin.encoder)
    assert prove(model, twin, work, bf16=True).gradients > 0


def test_checkpoints_of_activations_save_memory(model: MaskedImageModel, work: Workload) -> None:
    update, peaks = OurUpdate(model, work, bf16=True), []
    for recompute in (False, True):
        model.encoder.activation_checkpointing = recompute
        update()
        torch.cuda.reset_peak_memory_stats()
        update()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]


def test_pinned_batches_arrive_as_they_were() -> None:
    batch = make_workload(4, device=torch.device("cpu")).batch.pin_memory()
    assert all(field.is_pinned() for field in batch if field.numel())
    arrived: Batch = batch.to(CUDA)
    torch.cuda.synchronize()
    for one, other in zip(batch, arrived, strict=True):
        assert other.is_cuda and torch.equal(one, other.cpu())
