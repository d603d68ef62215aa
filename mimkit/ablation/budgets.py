"""What each arm costs, and how many steps it gets where FLOPs or time are equal."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mimkit import build
from mimkit.audit.cost import Cost, Milliseconds, cost, measure
from mimkit.config import Config, StudyConfig

_ROUNDS = 3  # of timing, after one that warms up
_IMAGES = 2  # in a timed batch


@dataclass(frozen=True)
class ArmCost:
    """Of one arm. Training an image is taken as three times its forward pass.

    Attributes:
        params: of stem and encoder.
        gflops: of an image, forward, a multiply-add counting twice (torch's counter).
        gflops_paper: by the paper's rule: a multiply-add once, 5 for a normalised element; its own
            classifier head is counted too, so that the numbers stand beside Table 7.
        stem_share: of gflops_paper.
        ms_forward, ms_train: of an image, one thread, processor time of this machine.
    """

    params: int
    gflops: float
    gflops_paper: float
    stem_share: float
    ms_forward: float
    ms_train: float

    def record(self) -> dict[str, float]:
        return asdict(self)


def arm_costs(
    arms: dict[str, Config], *, say: Callable[[str], object] = lambda text: None
) -> dict[str, ArmCost]:
    """Counts every arm; times each stem and each encoder once, of which an arm's time is the sum.

    They are timed in turns, so that other load hits them alike.
    """
    say(f"timing {len(arms)} arms")
    parts: dict[str, tuple[nn.Module, Tensor]] = {}
    for config in arms.values():
        stem, encoder = _keys(config)
        if stem not in parts:
            parts[stem] = build.build_stem(config), _noise(3, *[config.data.image_size] * 2)
        if encoder not in parts:
            made = build.build_model(config, prediction_dim=2).image_encoder.encoder
            tokens = _noise(made.grid[0] * made.grid[1], made.width)
            parts[encoder] = made, tokens.requires_grad_()  # a stem wants its gradient
    taken = measure(parts, rounds=_ROUNDS, bf16=build.use_bf16(next(iter(arms.values())).engine),
                    progress=lambda rounds: rounds)  # fmt: skip
    return {name: _cost(name, config, [taken[key] for key in _keys(config)])
            for name, config in arms.items()}  # fmt: skip


def _keys(config: Config) -> tuple[str, str]:
    """What a stem's time depends on, and an encoder's."""
    side = config.data.image_size
    encoder = config.encoder.model_dump_json()
    return f"{config.stem.model_dump_json()} {side} {encoder}", f"{side} {encoder}"


def _noise(*shape: int) -> Tensor:
    return torch.rand(_IMAGES, *shape, generator=torch.Generator().manual_seed(0))


def _cost(name: str, config: Config, taken: list[Milliseconds]) -> ArmCost:
    with torch.device("meta"):
        model = build.build_model(config, prediction_dim=2).image_encoder
    counted: Cost = cost(model, stem=name, name=name)
    return ArmCost(
        params=sum(parameter.numel() for parameter in model.parameters()),
        gflops=counted.gflops,
        gflops_paper=counted.gflops_paper,
        stem_share=counted.stem_share,
        ms_forward=sum(one.forward for one in taken),
        ms_train=sum(one.train for one in taken),
    )


def steps_of_arms(
    study: StudyConfig, arms: dict[str, Config], costs: dict[str, ArmCost], *, steps: int
) -> dict[str, int] | None:
    """Steps of each arm; the reference keeps its own. None where steps are equal.

    Args:
        steps: the reference's.
    """
    if study.budget == "steps":
        return None
    price: Literal["gflops", "ms_train"] = "gflops" if study.budget == "flops" else "ms_train"
    whole = steps * getattr(costs[study.reference], price)
    return {name: max(1, round(whole / getattr(costs[name], price))) for name in arms}
