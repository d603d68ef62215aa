"""mimkit's own step, as `mimkit pretrain` makes it, on a bench's workload."""

import torch

from mimkit.bench.workload import (
    BETAS,
    CLIP,
    DROP_PATH,
    EPS,
    HALF,
    LR,
    NUM_MASKED,
    WEIGHT_DECAY,
    GivenTokens,
    Workload,
)
from mimkit.models.blocks import draw_keep, drop_path_rates
from mimkit.models.mim import MaskedImageModel
from mimkit.models.roles import decays
from mimkit.random import Purpose, torch_generator
from mimkit.tokenizers import VisualTokenizer
from mimkit.train.metrics import Meter
from mimkit.train.optimizer import make_optimizer, set_learning_rate
from mimkit.train.runtimes import UpdateRule
from mimkit.train.runtimes.local import LocalRuntime
from mimkit.train.step import StepResult, mim_step


class OurUpdate:
    """One update after the other; nothing is fetched from the device.

    Args:
        drop_path: chance of the last block; 0 is without it.
        tokenizer: encodes the batch's token views where it holds no tokens.
    """

    def __init__(
        self,
        model: MaskedImageModel,
        work: Workload,
        *,
        bf16: bool,
        drop_path: float = DROP_PATH,
        tokenizer: VisualTokenizer | None = None,
    ) -> None:
        self.model, self.work, self.tokenizer = model, work, tokenizer or GivenTokens()
        self.rates_L = drop_path_rates(model.encoder.depth, drop_path)
        self.noise = torch_generator(Purpose.DROP_PATH, seed=0)
        self.runtime, self.meter = LocalRuntime(), Meter()
        self.runtime.device = work.device
        self.optimizer = make_optimizer(
            model, decays=decays, weight_decay=WEIGHT_DECAY, betas=BETAS, eps=EPS
        )
        rule = UpdateRule(micro_batch=work.size, accumulation=1, clip_grad=CLIP, bf16=bf16,
                          zero_stage=0, deepspeed_config=None)  # fmt: skip
        self.runtime.prepare(model, self.optimizer, rule)
        self.runtime.model.train()
        set_learning_rate(self.optimizer, LR)

    def forward(self, work: Workload) -> StepResult:
        keep_LB2R = None
        if any(self.rates_L):
            drawn_LB2R = draw_keep(self.rates_L, batch=work.size, generator=self.noise)
            keep_LB2R = drawn_LB2R.to(work.device, non_blocking=True)
        return mim_step(
            self.runtime.model, self.tokenizer, work.batch, mean=HALF, std=HALF,
            keep_LB2R=keep_LB2R, num_masked=NUM_MASKED,
        )  # fmt: skip

    def __call__(self) -> None:
        result = self.forward(self.work)
        self.runtime.backward(result.loss)
        self.meter.add(result.sums)


def count_flops(model: MaskedImageModel) -> tuple[float, float]:
    """GFLOP of an image: forward, and forward with backward; a multiply-add is two.

    Counted on the meta device (`model` lies there) with attention as the plain formula: torch's
    counter misses the fused one on a CPU.
    """
    from torch.utils.flop_counter import FlopCounterMode

    images = 2  # batch norm in training needs more than one value
    rows, columns = model.encoder.grid
    side = model.stem.patch_size
    image_BCHW = torch.empty(images, 3, rows * side, columns * side, device="meta")
    mask_BN = torch.empty(images, rows * columns, dtype=torch.bool, device="meta")
    with FlopCounterMode(display=False) as forward:
        predicted_MV = model.train()(image_BCHW, mask_BN, num_masked=NUM_MASKED)
    with FlopCounterMode(display=False) as backward:
        predicted_MV.sum().backward()
    first, second = forward.get_total_flops(), backward.get_total_flops()
    return first / images / 1e9, (first + second) / images / 1e9
