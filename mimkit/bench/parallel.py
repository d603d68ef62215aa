"""Latency of parallel blocks, branch by branch and fused, beside as many blocks in a row.

The measurement of the paper's Table 4, for a batch of 1 to 64.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mimkit.bench.comparison import Comparison, time_ways
from mimkit.bench.workload import make_model, make_workload
from mimkit.errors import UserError
from mimkit.models.fused import fused
from mimkit.models.regroup import regroup

BATCHES = (1, 2, 4, 8, 16, 32, 64)  # of the paper's table
SEQUENTIAL, BRANCHES, FUSED = "in a row", "branch by branch", "fused"
_EQUAL = 1e-4  # of tokens, relative, between branches that are fused and that are not


def measure_parallel(
    size: str,
    *,
    batches: Sequence[int] = BATCHES,
    branches: int = 2,
    bf16: bool,
    device: torch.device,
    rounds: int,
    done: Callable[[], object] = lambda: None,
) -> list[Comparison]:
    """Forward only, one comparison a batch size; the same weights, grouped.

    Raises:
        UserError: fused blocks do not give what their branches give.
    """
    row = make_model(size).image_encoder.eval().to(device).requires_grad_(False)
    grouped = regroup(row, branches=branches).eval()
    models: dict[str, nn.Module] = {SEQUENTIAL: row, BRANCHES: grouped, FUSED: fused(grouped)}
    _check_equal(models, device)
    depth = row.encoder.depth
    return [
        Comparison(
            title=f"ViT-{size}, {depth} blocks in a row, or {depth // branches} of {branches} "
            f"branches; forward, batch {batch}, {'bf16 autocast' if bf16 else 'fp32'}",
            base=SEQUENTIAL,
            per=batch,
            seconds=_seconds(models, batch, bf16=bf16, device=device, rounds=rounds, done=done),
        )
        for batch in batches
    ]


def _seconds(
    models: dict[str, nn.Module],
    batch: int,
    *,
    bf16: bool,
    device: torch.device,
    rounds: int,
    done: Callable[[], object],
) -> dict[str, list[float]]:
    image_BCHW = make_workload(batch, device=device).image_BCHW

    def forward(model: nn.Module) -> Callable[[], None]:
        @torch.no_grad()
        def run() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                model(image_BCHW)

        return run

    ways = {name: forward(model) for name, model in models.items()}
    return time_ways(ways, rounds=rounds, device=device, done=done)


@torch.no_grad()
def _check_equal(models: dict[str, nn.Module], device: torch.device) -> None:
    image_BCHW = make_workload(2, device=device).image_BCHW
    one, other = models[BRANCHES](image_BCHW), models[FUSED](image_BCHW)
    apart = float((one - other).norm() / one.norm())
    if not apart <= _EQUAL:
        raise UserError(
            f"fused blocks are {apart:.1e} from their branches; expected at most {_EQUAL:.0e}. "
            "Please report this with your version of torch"
        )
