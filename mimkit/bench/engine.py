"""What DeepSpeed costs over plain PyTorch in one process, and what the flight recorder does.

Every way of updating has a model of its own with the same weights and makes the same updates, in
turns, so that what else the machine does is the same for all.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mimkit.batch import Batch
from mimkit.bench.timing import Spread, one_thread, spread, take_turns
from mimkit.models.encoder import Encoder
from mimkit.models.init import initialise
from mimkit.models.mim import MaskedImageModel
from mimkit.models.roles import decays
from mimkit.models.stems.linear import Linear
from mimkit.train.flight import FlightRecorder
from mimkit.train.optimizer import make_optimizer, set_learning_rate
from mimkit.train.runtimes import RUNTIMES, Runtime, UpdateRule

PLAIN, RECORDED = "plain PyTorch", "plain PyTorch, flight recorder"
_SIDE, _PATCH, _WORDS, _MASKED = 224, 16, 512, 75
Work = Callable[[Batch], object]


@dataclass(frozen=True)
class EngineReport:
    """CPU seconds of an update, and how many times plain PyTorch's that is, round by round."""

    seconds: Mapping[str, Spread]
    ratio: Mapping[str, Spread]
    parameters: int
    batch: int


def measure(
    *, stages: tuple[int, ...], rounds: int, batch: int, depth: int, updates: int = 1
) -> EngineReport:
    """Times one update of a ViT-Ti of `depth` blocks at 224 pixels in fp32, clipping included.

    Args:
        updates: of each in a round.
    """
    with one_thread():
        engine = RUNTIMES["deepspeed"]()
        works: dict[str, Work] = {PLAIN: _work(RUNTIMES["local"](), 0, batch, depth)}
        works[RECORDED] = _recorded(RUNTIMES["local"](), batch, depth)
        works |= {f"DeepSpeed, ZeRO {stage}": _work(engine, stage, batch, depth)
                  for stage in stages}  # fmt: skip
        batches = [_batch(batch, seed) for seed in range(updates)]
        for work in works.values():  # buckets, caches, first touch of memory
            work(batches[0])
        seconds = take_turns(works, batches, rounds=rounds)
        engine.close()
    plain = seconds[PLAIN]
    return EngineReport(
        {name: spread(s / updates for s in found) for name, found in seconds.items()},
        {name: spread(a / b for a, b in zip(found, plain, strict=True))
         for name, found in seconds.items()},
        sum(p.numel() for p in _model(depth).parameters()), batch,
    )  # fmt: skip


def _model(depth: int) -> MaskedImageModel:
    side = _SIDE // _PATCH
    model = MaskedImageModel(
        stem=Linear(width=192, patch_size=_PATCH),
        encoder=Encoder(width=192, heads=3, depth=depth, grid=(side, side)),
        prediction_dim=_WORDS,
    )
    initialise(model, seed=0)
    return model


def _batch(rows: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    patches = (_SIDE // _PATCH) ** 2
    return Batch(
        torch.randint(256, (rows, 3, _SIDE, _SIDE), generator=draw, dtype=torch.uint8),
        torch.empty(0, dtype=torch.uint8),
        torch.rand(rows, patches, generator=draw).argsort(dim=1) < _MASKED,
        torch.zeros(rows, dtype=torch.int64),
        torch.arange(rows),
        torch.randint(_WORDS, (rows, patches), generator=draw, dtype=torch.int32),
    )


def _started(runtime: Runtime, stage: int, batch: int, depth: int) -> torch.optim.Optimizer:
    model = _model(depth)
    optimizer = make_optimizer(model, decays=decays, weight_decay=0.05, betas=(0.9, 0.999),
                               eps=1e-8)  # fmt: skip
    rule = UpdateRule(micro_batch=batch, accumulation=1, clip_grad=3.0, bf16=False,
                      zero_stage=stage, deepspeed_config=None)  # fmt: skip
    runtime.prepare(model, optimizer, rule)
    runtime.model.train()
    set_learning_rate(optimizer, 1e-4)
    return optimizer


def _work(runtime: Runtime, stage: int, batch: int, depth: int) -> Work:
    _started(runtime, stage, batch, depth)
    return _Update(runtime)


def _recorded(runtime: Runtime, batch: int, depth: int) -> Work:
    optimizer, update = _started(runtime, 0, batch, depth), _Update(runtime)
    flight = FlightRecorder(Path(), rank=0, world=1, facts={})
    done = iter(range(10**9))

    def work(given: Batch) -> None:
        number = next(done)
        flight.begin(given, updates=number, first_row=0, position=number)
        flight.loss(update(given))
        flight.end(optimizer=optimizer, grad_norm=runtime.grad_norm, parts=runtime.parts())

    return work


class _Update:
    """Forward, backward and update, with the engine that the runtime has now."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = copy(runtime)  # the next `prepare` replaces the engine of the original

    def __call__(self, batch: Batch) -> Tensor:
        image_BCHW = batch.patch_view_BCHW.float() / 127.5 - 1
        predicted_MV = self._runtime.model(image_BCHW, batch.mask_BN, None).float()
        target_M = batch.token_BN[batch.mask_BN].long()
        loss = nn.functional.cross_entropy(predicted_MV, target_M)
        self._runtime.backward(loss)
        return loss.detach()
