"""What each arm costs, and how many steps it gets where FLOPs or time are equal."""

from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from mimkit import build
from mimkit.audit.cost import Cost, Milliseconds, cost, measure
from mimkit.config import Config

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


@dataclass(frozen=True)
class Costs:
    """
    Attributes:
        of: by arm, of those that could be measured.
        broken: why the others could not, whatever their parts raised.
    """

    of: dict[str, ArmCost]
    broken: dict[str, Exception]


def arm_costs(
    arms: dict[str, Config], *, say: Callable[[str], object] = lambda text: None
) -> Costs:
    """Counts every arm; times each stem and each encoder once, of which an arm's time is the sum.

    They are timed in turns, so that other load hits them alike.
    """
    say(f"timing {len(arms)} arms")
    parts: dict[str, tuple[nn.Module, Tensor]] = {}
    counted: dict[str, tuple[int, Cost]] = {}
    broken: dict[str, Exception] = {}
    for name, config in arms.items():
        try:
            counted[name] = _counted(name, config)
            parts |= _parts(config, parts)
        except Exception as error:  # of any kind: a part may be a user's own
            broken[name] = error
    failed: dict[str, Exception] = {}
    taken = measure(parts, rounds=_ROUNDS, bf16=build.use_bf16(next(iter(arms.values())).engine),
                    progress=lambda rounds: rounds, failed=failed.setdefault)  # fmt: skip
    for name, config in arms.items():
        for key in _keys(config):
            if key in failed:
                broken.setdefault(name, failed[key])
    found = {name: _cost(*counted[name], [taken[key] for key in _keys(config)])
             for name, config in arms.items() if name not in broken}  # fmt: skip
    return Costs(found, broken)


def _parts(config: Config, made: Container[str]) -> dict[str, tuple[nn.Module, Tensor]]:
    """Stem and encoder of an arm with what they are given, save those that are made already."""
    stem, encoder = _keys(config)
    found: dict[str, tuple[nn.Module, Tensor]] = {}
    if stem not in made:
        found[stem] = build.build_stem(config), _noise(3, *[config.data.image_size] * 2)
    if encoder not in made:
        module = build.build_model(config, prediction_dim=2).image_encoder.encoder
        tokens = _noise(module.grid[0] * module.grid[1], module.width)
        found[encoder] = module, tokens.requires_grad_()  # a stem wants its gradient
    return found


def _keys(config: Config) -> tuple[str, str]:
    """What a stem's time depends on, and an encoder's."""
    side = config.data.image_size
    encoder = config.encoder.model_dump_json()
    return f"{config.stem.model_dump_json()} {side} {encoder}", f"{side} {encoder}"


def _noise(*shape: int) -> Tensor:
    return torch.rand(_IMAGES, *shape, generator=torch.Generator().manual_seed(0))


def _counted(name: str, config: Config) -> tuple[int, Cost]:
    """Parameters, and what else can be counted."""
    with torch.device("meta"):
        model = build.build_model(config, prediction_dim=2).image_encoder
    params = sum(parameter.numel() for parameter in model.parameters())
    return params, cost(model, stem=name, name=name)


def _cost(params: int, counted: Cost, taken: list[Milliseconds]) -> ArmCost:
    return ArmCost(
        params=params,
        gflops=counted.gflops,
        gflops_paper=counted.gflops_paper,
        stem_share=counted.stem_share,
        ms_forward=sum(one.forward for one in taken),
        ms_train=sum(one.train for one in taken),
    )


def equal_steps(prices: Mapping[str, float], *, reference: str, steps: int) -> dict[str, int]:
    """Steps of each arm that cost as much as the reference's; that one keeps its own.

    Args:
        prices: of a step of each arm, in FLOPs or seconds.
        steps: the reference's.
    """
    whole = steps * prices[reference]
    return {name: max(1, round(whole / price)) for name, price in prices.items()}
