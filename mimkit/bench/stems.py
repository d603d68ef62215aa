"""What each stem costs: forward and backward alone, and as a share of a whole step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mimkit.bench.comparison import Comparison, time_ways
from mimkit.bench.our_step import OurUpdate
from mimkit.bench.workload import Workload, make_model, make_workload
from mimkit.models.stems import STEMS

STEP = "(whole step with linear)"


def measure_stems(
    size: str,
    *,
    batch: int,
    bf16: bool,
    device: torch.device,
    rounds: int,
    done: Callable[[], object] = lambda: None,
) -> Comparison:
    """Every stem, beside the linear one.

    A whole step with each would have to be timed to a tenth of a percent; so a stem's cost is its
    own time minus the linear one's, over the time of the whole step.
    """
    work = make_workload(batch, device=device)
    stems = {name: make_model(size, stem=name).stem.to(device).train() for name in STEMS.names()}
    ways = {name: _pass(stem, work, bf16) for name, stem in stems.items()}
    whole = OurUpdate(make_model(size), work, bf16=bf16)
    seconds = time_ways({**ways, STEP: whole}, rounds=rounds, device=device, done=done)
    more = {
        name: [100 * (own - linear) / step for own, linear, step in zip(
            seconds[name], seconds["linear"], seconds[STEP], strict=True)]
        for name in stems
    }  # fmt: skip
    return Comparison(
        title=f"stems of ViT-{size}, forward and backward, batch {batch}, {_word(bf16)}",
        base="linear",
        per=batch,
        seconds=seconds,
        columns={
            "step +%": {name: sorted(found)[len(found) // 2] for name, found in more.items()},
            "least": {name: min(found) for name, found in more.items()},
            "most": {name: max(found) for name, found in more.items()},
        },
        notes=("step +%: what the whole step takes longer than with the linear stem",),
    )


def _pass(stem: nn.Module, work: Workload, bf16: bool) -> Callable[[], None]:
    def run() -> None:
        stem.zero_grad()
        with torch.autocast(work.device.type, torch.bfloat16, enabled=bf16):
            tokens_BND: Tensor = stem(work.image_BCHW, work.mask_BN)
        tokens_BND.float().square().mean().backward()  # type: ignore[no-untyped-call]

    return run


def _word(bf16: bool) -> str:
    return "bf16 autocast" if bf16 else "fp32"
