"""AdamW in one kernel beside torch's other ways."""

from collections.abc import Callable

import torch
from torch import nn

from mimkit.bench.comparison import Comparison, time_ways
from mimkit.bench.plain_step import plain_adamw
from mimkit.bench.workload import BETAS, EPS, LR, WEIGHT_DECAY, make_model
from mimkit.errors import UserError
from mimkit.models.roles import decays
from mimkit.train.optimizer import make_optimizer, set_learning_rate

LOOP, FOREACH, OURS = "plain loop", "foreach", "mimkit (fused)"
_EQUAL = 1e-7  # of weights, after the updates that were timed


def measure_optimizer(
    size: str,
    *,
    device: torch.device,
    rounds: int,
    done: Callable[[], object] = lambda: None,
) -> Comparison:
    """One update of all weights, gradients given.

    Raises:
        UserError: they did not arrive at the same weights.
    """
    models = {way: make_model(size).to(device) for way in (LOOP, FOREACH, OURS)}
    for model in models.values():
        _give_gradients(model)
    ours = make_optimizer(models[OURS], decays=decays, weight_decay=WEIGHT_DECAY, betas=BETAS,
                          eps=EPS)  # fmt: skip
    set_learning_rate(ours, LR)
    foreach = plain_adamw(models[FOREACH])
    for group in foreach.param_groups:
        group["foreach"] = True
    optimizers = {LOOP: plain_adamw(models[LOOP]), FOREACH: foreach, OURS: ours}
    ways = {way: optimizer.step for way, optimizer in optimizers.items()}
    seconds = time_ways(ways, rounds=rounds, device=device, done=done)
    apart = _apart(models[LOOP], models[OURS])
    if not apart <= _EQUAL:
        raise UserError(
            f"after {rounds + 1} updates fused AdamW is {apart:.1e} from the loop; expected at "
            f"most {_EQUAL:.0e}. Please report this with your version of torch"
        )
    million = sum(p.numel() for p in models[OURS].parameters()) / 1e6
    return Comparison(
        title=f"one update of the {million:.1f} M parameters of ViT-{size} with BEiT's head",
        base=LOOP,
        per=1,
        seconds=seconds,
        notes=(f"weights afterwards: at most {apart:.0e} from the loop's",),
    )


def _give_gradients(model: nn.Module) -> None:
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        gradient = 1e-3 * torch.randn(parameter.shape, generator=draw)
        parameter.grad = gradient.to(parameter.device)


def _apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((left - right).detach().abs().max()) for left, right in pairs)
