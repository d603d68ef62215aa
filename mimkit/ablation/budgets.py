"""What each arm costs, and how many steps it gets where FLOPs or time are equal."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from mimkit import build
from mimkit.audit.cost import Cost, Milliseconds, cost, measure
from mimkit.config import Config, StudyConfig
from mimkit.models.encoder import ImageEncoder

_ROUNDS = 3  # of timing, after one that warms up
_IMAGES = 4  # in a timed batch


@dataclass(frozen=True)
class ArmCost:
    """Of one arm. Training an image is taken as three times its forward pass.

    Attributes:
        params: of stem and encoder.
        gflops: of an image, forward, a multiply-add counting twice (torch's counter).
        gflops_paper: by the paper's rule: a multiply-add once, 5 for a normalised element; its own
            classifier head is counted too, so that the numbers stand beside Table 7.
        stem_share: of gflops_paper.
        ms_forward, ms_train: of an image, one thread, process time of this machine.
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
    """Counts every arm, and times all of them in turns, so that other load hits them alike."""
    models = {name: _encoder(config) for name, config in arms.items()}
    say(f"timing {len(models)} arms")
    first = next(iter(arms.values()))
    side = first.data.image_size
    image_BCHW = torch.rand(_IMAGES, 3, side, side, generator=torch.Generator().manual_seed(0))
    taken = measure(
        {name: (model, image_BCHW) for name, model in models.items()},
        rounds=_ROUNDS, bf16=build.use_bf16(first.engine), progress=lambda rounds: rounds,
    )  # fmt: skip
    return {name: _cost(name, models[name], taken[name]) for name in models}


def _encoder(config: Config) -> ImageEncoder:
    return build.build_model(config, prediction_dim=2).image_encoder


def _cost(name: str, model: ImageEncoder, taken: Milliseconds) -> ArmCost:
    counted: Cost = cost(model.to("meta"), stem=name, name=name)
    return ArmCost(
        params=sum(parameter.numel() for parameter in model.parameters()),
        gflops=counted.gflops,
        gflops_paper=counted.gflops_paper,
        stem_share=counted.stem_share,
        ms_forward=taken.forward,
        ms_train=taken.train,
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
