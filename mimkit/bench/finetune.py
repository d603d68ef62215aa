"""Finetuning only the attention layers, or only the MLPs, beside finetuning all (P, section 4)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mimkit.bench.comparison import Comparison, parameter_bytes, time_ways
from mimkit.bench.memory import saved_mib
from mimkit.bench.timing import ratios
from mimkit.bench.workload import (
    BETAS,
    CLIP,
    DROP_PATH,
    EPS,
    LR,
    WEIGHT_DECAY,
    Workload,
    make_model,
    make_workload,
)
from mimkit.models.blocks import draw_keep, drop_path_rates
from mimkit.models.classifier import ImageClassifier, with_bias_per_block
from mimkit.models.roles import decays, trained_names
from mimkit.random import Purpose, torch_generator
from mimkit.train.optimizer import make_optimizer, set_learning_rate
from mimkit.train.runtimes import UpdateRule
from mimkit.train.runtimes.local import LocalRuntime

FULL, ATTENTION, FFN = "all weights", "attention only", "MLPs only"
_ROLES = {FULL: "all", ATTENTION: "attention", FFN: "ffn"}
_CLASSES = 1000


class _Finetuning:
    """Updates of a classifier; a relative bias for each block, as BEiT finetunes."""

    def __init__(self, size: str, work: Workload, *, roles: str, bf16: bool) -> None:
        encoder = with_bias_per_block(make_model(size).image_encoder)
        self.model = ImageClassifier(encoder, num_classes=_CLASSES, pooling="mean")
        self.model.initialise_head(seed=0, scale=1.0)
        if roles != "all":
            trained = trained_names(self.model, [roles])
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name in trained)
        self.rates_L = drop_path_rates(encoder.encoder.depth, DROP_PATH)
        self.noise = torch_generator(Purpose.DROP_PATH, seed=0)
        self.work, self.runtime = work, LocalRuntime()
        self.runtime.device = work.device
        optimizer = make_optimizer(
            self.model, decays=decays, weight_decay=WEIGHT_DECAY, betas=BETAS, eps=EPS
        )
        rule = UpdateRule(micro_batch=work.size, accumulation=1, clip_grad=CLIP, bf16=bf16,
                          zero_stage=0, deepspeed_config=None)  # fmt: skip
        self.runtime.prepare(self.model, optimizer, rule)
        self.runtime.model.train()
        set_learning_rate(optimizer, LR)

    def loss(self, work: Workload) -> Tensor:
        drawn_LB2R = draw_keep(self.rates_L, batch=work.size, generator=self.noise)
        keep_LB2R = drawn_LB2R.to(work.device, non_blocking=True)
        logits_BV = self.runtime.model(work.image_BCHW, keep_LB2R).float()
        return functional.cross_entropy(logits_BV, work.token_BN[:, 0] % _CLASSES)

    def __call__(self) -> None:
        self.runtime.backward(self.loss(self.work))


def measure_finetune(
    size: str,
    *,
    batch: int,
    bf16: bool,
    device: torch.device,
    rounds: int,
    done: Callable[[], object] = lambda: None,
) -> Comparison:
    """Time of an update, what is kept for backward, and gradients with AdamW's moments."""
    work, few = make_workload(batch, device=device), make_workload(4, device=device)
    ways = {name: _Finetuning(size, work, roles=roles, bf16=bf16) for name, roles in _ROLES.items()}
    seconds = time_ways(ways, rounds=rounds, device=device, done=done)
    saved = {
        name: saved_mib(lambda number, way=way: way.loss(few.first(number)), way.model)  # type: ignore[misc]
        for name, way in ways.items()
    }
    state = {name: parameter_bytes(way.model, copies=3) / 2**20 for name, way in ways.items()}

    def over_all(name: str) -> str:
        ratio = {
            "time": ratios(seconds[name], seconds[FULL]).median,
            "saved": saved[name] / saved[FULL],
            "state": state[name] / state[FULL],
        }
        return f"{name} over all: " + ", ".join(f"{what} {ratio[what]:.2f}" for what in ratio)

    return Comparison(
        title=f"finetuning ViT-{size}, batch {batch}, {'bf16 autocast' if bf16 else 'fp32'}",
        base=FULL,
        per=batch,
        seconds=seconds,
        columns={"saved MiB": saved, "state MiB": state},
        notes=(
            over_all(ATTENTION),
            over_all(FFN),
            "saved: for backward, an image; state: gradients and AdamW's moments",
        ),
    )
