"""The attentive probe: one learned query looks at all patch tokens, a linear layer at what it saw.

Of AIM (El-Nouby et al. 2024), V-JEPA and CAPI: masked image models keep what they know in their
patch tokens, and a mean or a class token loses some of it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mimkit.downstream.features import Features
from mimkit.downstream.probes import PROBES, Candidate, Candidates, Probe, Progress
from mimkit.downstream.probes._heads import Plan, Standard, head_logits, measure, train_heads
from mimkit.random import Purpose, torch_generator

POOLING = "attention"


@PROBES.register
class Attentive(Probe):
    """Cross-attention of one query, then a linear layer, trained by AdamW along a cosine to 0.

    Tokens are standardised (AIM's BatchNorm without affine parameters).

    Args:
        rates: peak learning rates for batches of 256.
        epochs: over the images, but at least `least` updates.
        head_width: D / head_width heads, as in the encoder; one where that does not divide.
        device: where heads are trained.
        seed: of the first weights and the order of the images.
    """

    setting = "rate"
    needs_tokens = True

    def __init__(
        self,
        *,
        rates: Sequence[float] = (3e-4, 1e-3, 3e-3, 1e-2),
        epochs: int = 30,
        least: int = 500,
        weight_decay: float = 0.01,
        head_width: int = 64,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self._rates, self._plan, self._head_width = tuple(rates), Plan(epochs, least), head_width
        self._optimizer = partial(torch.optim.AdamW, weight_decay=weight_decay)
        self._device, self._seed = torch.device(device), seed

    def candidates(self, features: Features) -> Candidates:
        return Candidates(features.token_layers, (POOLING,), self._rates)

    def logits(
        self,
        candidates: Candidates,
        train: Features,
        fit: Tensor,
        judged: Features,
        rows: Tensor,
        *,
        num_classes: int,
        progress: Progress,
    ) -> dict[Candidate, Tensor]:
        """Layer by layer: the tokens of one are all that a batch needs to hold."""
        found: dict[Candidate, Tensor] = {}
        for number, layer in enumerate(candidates.layers):

            def told(done: int, total: int, before: int = number) -> None:
                progress(before * total + done, len(candidates.layers) * total)

            found |= self._of_layer(layer, candidates.settings, train, fit, judged, rows,
                                    num_classes=num_classes, progress=told)  # fmt: skip
        return found

    def _of_layer(
        self,
        layer: int,
        rates: Sequence[float],
        train: Features,
        fit: Tensor,
        judged: Features,
        rows: Tensor,
        *,
        num_classes: int,
        progress: Progress,
    ) -> dict[Candidate, Tensor]:
        read = _Tokens(train, layer, self._device)
        standard = measure(read.array_BND, fit, over=(0, 1))
        width = read.array_BND.shape[-1]
        heads = {
            rate: nn.ModuleList([self._head(width, num_classes)]).to(self._device) for rate in rates
        }
        train_heads(heads, self._optimizer, features=read.standardised(standard),
                    label_B=train.label_B, rows=fit, plan=self._plan, seed=self._seed,
                    progress=progress)  # fmt: skip
        judge = _Tokens(judged, layer, self._device).standardised(standard)
        return {Candidate(layer, POOLING, rate): head_logits(group, judge, rows)[0][0]
                for rate, group in heads.items()}  # fmt: skip

    def _head(self, width: int, num_classes: int) -> "AttentiveHead":
        heads = width // self._head_width if width % self._head_width == 0 else 1
        return AttentiveHead(width, heads=heads, num_classes=num_classes,
                             generator=torch_generator(Purpose.PROBE, seed=self._seed))  # fmt: skip


class _Tokens:
    """Rows -> patch tokens of one layer."""

    def __init__(self, features: Features, layer: int, device: torch.device) -> None:
        assert features.tokens_BLND is not None
        self.array_BND = features.tokens_BLND[:, features.token_layers.index(layer)]
        self._device = device

    def standardised(self, standard: Standard) -> Callable[[Tensor], Tensor]:
        on_device = Standard(*(part.to(self._device) for part in standard))

        def read(rows: Tensor) -> Tensor:
            return on_device(torch.from_numpy(self.array_BND[rows.numpy()]).to(self._device))

        return read


class AttentiveHead(nn.Module):
    """token_BND -> logit_1BV: K heads attend with one query each, values are projected, classified.

    Queries and keys appear only as q_k . (W_k x) = (W_k' q_k) . x, so the product W_k' q_k is what
    is learnt: the same functions as with a projection of keys, without its N x D x D work for every
    image. Values are projected after they were averaged, which is the same as before.
    """

    def __init__(
        self, width: int, *, heads: int, num_classes: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self._scale = 1 / math.sqrt(width)
        self.query_KD = nn.Parameter(torch.randn(heads, width, generator=generator) * 0.02)
        value_KDd = torch.randn(heads, width, width // heads, generator=generator)
        self.value_KDd = nn.Parameter(value_KDd * self._scale)
        self.weight_DV = nn.Parameter(torch.zeros(width, num_classes))
        self.bias_V = nn.Parameter(torch.zeros(num_classes))

    def forward(self, token_BND: Tensor) -> Tensor:
        attention_BNK = (token_BND @ self.query_KD.T * self._scale).softmax(1)
        seen_BKD = attention_BNK.transpose(1, 2) @ token_BND
        value_BD = torch.einsum("bkc,kcd->bkd", seen_BKD, self.value_KDd).flatten(1)
        logit_BV = torch.addmm(self.bias_V, value_BD, self.weight_DV)
        return logit_BV[None]
