"""Proof that arms are paired: each arm's first batches and first weights are built and compared."""

import hashlib
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mimkit import build
from mimkit.batch import Batch, to_unit
from mimkit.config import Config
from mimkit.data.loader import train_loader
from mimkit.errors import UserError

_IMAGES = 16  # of the first batches that are built
_SHARED = ("order", "crops", "masks", "tokens", "grid", "batches")


@dataclass(frozen=True)
class Built:
    """What one arm starts with; hashes of what it sees, and of each initial weight by name.

    Attributes:
        order: of the first epoch's samples, as it is shuffled.
        crops, masks, tokens: of the first images of training.
        grid: rows x columns of patches.
        batches: global batch size and steps.
        weights: name -> (shape, hash).
    """

    order: str
    crops: str
    masks: str
    tokens: str
    grid: str
    batches: str
    weights: dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Pairing:
    """One arm beside the reference.

    Attributes:
        equal: what both see alike, of order, crops, masks, tokens, grid, batches.
        different: the rest of those, with both values.
        weights_equal: initial weights of equal name and shape that are equal, of `weights_alike`.
        weights_other: names that only one has, or in another shape.
    """

    arm: str
    equal: list[str]
    different: list[str]
    weights_equal: int
    weights_alike: int
    weights_other: list[str]

    def record(self) -> dict[str, Any]:
        return asdict(self)


def check_pairing(
    arms: dict[str, Config], *, reference: str, allowed: dict[str, list[str]]
) -> list[Pairing]:
    """Builds every arm's start and compares it with the reference's.

    Args:
        arms: with one seed.
        allowed: of each arm, which of order, crops, masks, tokens, grid, batches it may have of
            its own, since a declared setting changes them.

    Raises:
        UserError: an arm sees something else, or starts from other weights of the same shape.
    """
    built = {name: _built(name, config) for name, config in arms.items()}
    found = [_pair(name, built[name], built[reference]) for name in arms if name != reference]
    for one in found:
        hidden = [text for text in one.different if text.split(":")[0] not in allowed[one.arm]]
        if hidden:
            raise UserError(
                f"arm '{one.arm}' is not paired with '{reference}': {'; '.join(hidden)}. Both must "
                "see the same; a setting that changes it has to be the same in both, or declared"
            )
        if one.weights_equal < one.weights_alike:
            raise UserError(
                f"arm '{one.arm}' and '{reference}' share {one.weights_alike} initial weights by "
                f"name and shape, but only {one.weights_equal} are equal; does a part draw them "
                "outside of mimkit.models.init?"
            )
    return found


def _built(arm: str, config: Config) -> Built:
    try:
        return _build(config)
    except UserError as error:
        raise UserError(f"arm '{arm}': {error}") from error


def _build(config: Config) -> Built:
    tokenizer = build.build_tokenizer(config)
    model = build.build_model(config, prediction_dim=tokenizer.prediction_dim)
    grid = build.check_grids(config, model, tokenizer)
    mask = build.build_mask(config, grid)
    train, _ = build.build_data(config.data)
    loader = train_loader(source=train, views=build.build_views(config.data), mask=mask,
                          seed=config.seed, view_seed=config.data.view_seed, batch_size=_IMAGES,
                          rank=0, world=1, position=0, window=config.data.window, workers=0,
                          on_bad_sample=config.data.on_bad_sample)  # fmt: skip
    batch: Batch = next(islice(iter(loader), 1))
    steps = build.num_steps(config.train, train.epoch_length)
    target = tokenizer.encode(to_unit(batch.token_view_BChw))
    return Built(
        order=_digest(batch.index_B),
        crops=_digest(batch.patch_view_BCHW, batch.token_view_BChw),
        masks=_digest(batch.mask_BN),
        tokens=_digest(target),
        grid=f"{grid[0]}x{grid[1]}",
        batches=f"{config.train.batch_size} x {steps}",
        weights={name: (tuple(p.shape), _digest(p)) for name, p in model.state_dict().items()},
    )


@torch.no_grad()
def _digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def _pair(arm: str, one: Built, other: Built) -> Pairing:
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in _SHARED}
    names = one.weights.keys() & other.weights.keys()
    alike = [name for name in names if one.weights[name][0] == other.weights[name][0]]
    same = [name for name in alike if one.weights[name] == other.weights[name]]
    every = one.weights.keys() | other.weights.keys()
    return Pairing(
        arm,
        equal=[name for name, (mine, theirs) in pairs.items() if mine == theirs],
        different=[
            f"{name}: {mine} and {theirs}"
            for name, (mine, theirs) in pairs.items()
            if mine != theirs
        ],
        weights_equal=len(same),
        weights_alike=len(alike),
        weights_other=sorted(every - set(alike)),
    )
