"""Tokens out of a bank beside a tokenizer that runs in every step."""

from collections.abc import Callable

import torch

from mimkit.bench.comparison import Comparison, time_ways
from mimkit.bench.our_step import OurUpdate
from mimkit.bench.plain_step import PlainModel, PlainUpdate
from mimkit.bench.workload import DROP_PATH, VOCABULARY, make_model, make_workload
from mimkit.random import Purpose, torch_generator
from mimkit.tokenizers._dvae_model import make_dvae

TOKENIZER, IN_STEP = "tokenizer alone", "plain step with tokenizer"
GIVEN, BANK = "plain step, tokens given", "mimkit with token bank"
_SIDE = 112  # pixels of the tokenizer's view: 8 a token


def measure_tokens(
    size: str,
    *,
    batch: int,
    bf16: bool,
    device: torch.device,
    rounds: int,
    done: Callable[[], object] = lambda: None,
) -> Comparison:
    """The tokenizer is of DALL-E's size, in float32 as BEiT runs it, with weights by chance.

    Reading the bank is left out: it is 6 microseconds for 8 images.
    """
    work, model = make_workload(batch, device=device), make_model(size)
    dvae = make_dvae(
        width=256, blocks=2, vocabulary=VOCABULARY, generator=torch_generator(Purpose.INIT, seed=0)
    )
    del dvae.decoder
    dvae.to(device)
    view_BChw = torch.rand(batch, 3, _SIDE, _SIDE, device=device)
    plain = PlainUpdate(PlainModel(model, drop_path=DROP_PATH), work, bf16=bf16)

    @torch.no_grad()
    def tokenize() -> None:
        dvae.logits(view_BChw).argmax(1)

    def both() -> None:
        tokenize()
        plain()

    ways: dict[str, Callable[[], object]] = {
        IN_STEP: both, GIVEN: plain, TOKENIZER: tokenize, BANK: OurUpdate(model, work, bf16=bf16)
    }  # fmt: skip
    seconds = time_ways(ways, rounds=rounds, device=device, done=done)
    precision = "bf16 autocast" if bf16 else "fp32"
    return Comparison(
        title=f"ViT-{size} {precision} and DALL-E's dVAE in fp32, batch {batch}",
        base=IN_STEP,
        per=batch,
        seconds=seconds,
        columns={"times as fast": {
            way: _faster(seconds[IN_STEP], seconds[way]) for way in (GIVEN, BANK)}},
    )  # fmt: skip


def _faster(base: list[float], way: list[float]) -> float:
    found = sorted(above / below for above, below in zip(base, way, strict=True))
    return found[len(found) // 2]
