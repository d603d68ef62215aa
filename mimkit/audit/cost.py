"""What a stem and a model cost: parameters, arithmetic, memory for backward, time."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mimkit.models.encoder import ImageEncoder
from mimkit.models.saved import SavedForBackward

_CLASSES = 1000  # of the head that the paper's numbers include


@dataclass(frozen=True)
class Cost:
    """Of one image through a classifier: stem, encoder, linear head on the class token.

    FLOPs are counted with explicit attention; torch's counter misses the fused one on a CPU.
    """

    stem: str
    model: str  # size, depth and branches: B12, B6x2
    params: int
    gflops_paper: float  # multiply-adds counted once, and 5 for each element that is normalised
    gflops: float  # torch's: a multiply-add counts twice, norms nothing
    stem_share: float  # of gflops_paper
    activations_mib: float  # kept for backward, float32, without the weights
    ms_forward: float | None = None  # an image, one thread
    ms_train: float | None = None  # forward and backward
    stem_time_share: float | None = None  # of ms_train


@dataclass(frozen=True)
class _Count:
    flops: int
    normalised: int
    saved: float  # bytes for backward, an image

    @property
    def paper(self) -> float:
        return self.flops / 2 + 5 * self.normalised


def cost(model: ImageEncoder, *, stem: str, name: str) -> Cost:
    """Everything that can be counted, on a model of the meta device: no arithmetic is done.

    The paper's rule was found by trying which one gives its column (facts: 17.583 for ViT-B).
    """
    head = nn.Linear(model.encoder.width, _CLASSES, device="meta")
    rows, columns = model.encoder.grid
    side = model.stem.patch_size
    shape = (3, rows * side, columns * side)
    whole = _count(model, shape)
    first = _count(model.stem, shape)
    head_flops = 2 * model.encoder.width * _CLASSES
    paper = whole.paper + head_flops / 2
    return Cost(
        stem=stem,
        model=name,
        params=sum(p.numel() for module in (model, head) for p in module.parameters()),
        gflops_paper=paper / 1e9,
        gflops=(whole.flops + head_flops) / 1e9,
        stem_share=first.paper / paper,
        activations_mib=whole.saved / 2**20,
    )


def _count(module: nn.Module, shape: tuple[int, ...]) -> _Count:
    """Two images, halved: batch norm in training needs more than one value."""
    image_BCHW = torch.empty(2, *shape, device="meta")
    normalised = 0

    def add(module: nn.Module, given: object, output: Tensor) -> None:
        nonlocal normalised
        normalised += output.numel()

    norms = [m for m in module.modules() if isinstance(m, nn.LayerNorm | nn.BatchNorm2d)]
    handles = [norm.register_forward_hook(add) for norm in norms]
    with FlopCounterMode(display=False) as counter, SavedForBackward(module) as saved:
        kept = module.train()(image_BCHW)  # its graph holds what was saved, so no number is reused
    num_bytes = saved.num_bytes
    del kept
    for handle in handles:
        handle.remove()
    return _Count(counter.get_total_flops() // 2, normalised // 2, num_bytes / 2)


@dataclass(frozen=True)
class Milliseconds:
    """An image, one thread, process time: medians over rounds."""

    forward: float
    train: float


def measure(
    parts: dict[str, tuple[nn.Module, Tensor]],
    *,
    rounds: int,
    bf16: bool,
    progress: Callable[[Sequence[int]], Iterable[int]],
    failed: Callable[[str, Exception], object] | None = None,
) -> dict[str, Milliseconds]:
    """Each part's time on its input, parts taking turns so that a noisy machine hits all alike.

    Args:
        failed: told of a part that raises, which is left out then; without it the error is raised.
    """
    forward: dict[str, list[float]] = {name: [] for name in parts}
    train: dict[str, list[float]] = {name: [] for name in parts}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in progress(range(rounds + 1)):
            for name, (module, given) in parts.items():
                if name not in forward:
                    continue
                try:
                    took = _forward(module, given, bf16=bf16), _train(module, given, bf16=bf16)
                except Exception as error:
                    if failed is None:
                        raise
                    failed(name, error)
                    del forward[name]
                    continue
                if number:  # the first round warms up
                    forward[name].append(took[0] / len(given))
                    train[name].append(took[1] / len(given))
    finally:
        torch.set_num_threads(threads)
    return {
        name: Milliseconds(statistics.median(forward[name]), statistics.median(train[name]))
        for name in forward
    }


@torch.no_grad()
def _forward(module: nn.Module, given: Tensor, *, bf16: bool) -> float:
    module.eval()
    start = time.process_time()
    with _precision(bf16):
        module(given)
    return 1e3 * (time.process_time() - start)


def _train(module: nn.Module, given: Tensor, *, bf16: bool) -> float:
    module.train().zero_grad()
    start = time.process_time()
    with _precision(bf16):
        loss = module(given).float().square().mean()
    loss.backward()
    return 1e3 * (time.process_time() - start)


def _precision(bf16: bool) -> torch.autocast | nullcontext[None]:
    return torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()
