"""The linear probe: one linear layer on frozen features; all layers, poolings and rates at once.

The best layer of a masked image model is seldom the last (BEiT-B's is block 9 of 12), so all are
tried; they share one pass over the cached features.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mimkit.downstream.features import POOLINGS, Features
from mimkit.downstream.probes import PROBES, Candidate, Candidates, Probe, Progress
from mimkit.downstream.probes._heads import Plan, Standard, head_logits, measure, train_heads


@PROBES.register
class Linear(Probe):
    """MAE's linear probe (He et al. 2021, appendix A.1) on cached features, without augmentation.

    Features are standardised, weights start at 0, SGD with momentum 0.9 follows a cosine to 0. The
    loss is convex, so nothing depends on the start.

    Args:
        rates: peak learning rates for batches of 256.
        epochs: over the images, but at least `least` updates.
        weight_decay: of the weights, not the biases (MAE: 0).
        device: where heads are trained.
        seed: of the order of the images.
    """

    setting = "rate"

    def __init__(
        self,
        *,
        rates: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0),
        epochs: int = 30,
        least: int = 500,
        weight_decay: float = 0.0,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self._rates, self._plan = tuple(rates), Plan(epochs, least)
        self._optimizer = partial(torch.optim.SGD, momentum=0.9, weight_decay=weight_decay)
        self._device, self._seed = torch.device(device), seed

    def candidates(self, features: Features) -> Candidates:
        return Candidates(features.layers, POOLINGS, self._rates)

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
        layers = [train.layers.index(layer) for layer in candidates.layers]
        standard = measure(train.pooled_BLPD, fit, over=(0,))
        width = train.pooled_BLPD.shape[-1]
        heads = {
            rate: nn.ModuleList(
                _LinearHeads(pooling, len(layers), width, num_classes)
                for pooling in candidates.poolings
            ).to(self._device)
            for rate in candidates.settings
        }
        train_heads(heads, self._optimizer, features=self._reader(train, layers, standard),
                    label_B=train.label_B, rows=fit, plan=self._plan, seed=self._seed,
                    progress=progress)  # fmt: skip
        found: dict[Candidate, Tensor] = {}
        for rate, group in heads.items():
            outputs = head_logits(group, self._reader(judged, layers, standard), rows)
            for pooling, logit_LBV in zip(candidates.poolings, outputs, strict=True):
                for layer, logit_BV in zip(candidates.layers, logit_LBV, strict=True):
                    found[Candidate(layer, pooling, rate)] = logit_BV
        return found

    def _reader(self, features: Features, layers: list[int], standard: Standard) -> "_Reader":
        return _Reader(features, layers, standard, self._device)


class _Reader:
    """Rows -> standardised pooled features (L, B, P, D) of some layers, on the device."""

    def __init__(
        self, features: Features, layers: list[int], standard: Standard, device: torch.device
    ) -> None:
        self._array, self._layers, self._device = features.pooled_BLPD, layers, device
        self._standard = Standard(*(part[layers].to(device) for part in standard))

    def __call__(self, rows: Tensor) -> Tensor:
        pooled_BLPD = torch.from_numpy(self._array[rows.numpy()][:, self._layers])
        return self._standard(pooled_BLPD.to(self._device)).transpose(0, 1)


class _LinearHeads(nn.Module):
    """One linear layer for each of L layers, on one pooling."""

    def __init__(self, pooling: str, layers: int, width: int, num_classes: int) -> None:
        super().__init__()
        self._parts = {"mean": slice(0, 1), "cls": slice(1, 2), "cls+mean": slice(0, 2)}[pooling]
        inputs = 2 * width if pooling == "cls+mean" else width
        self.weight = nn.Parameter(torch.zeros(layers, inputs, num_classes))
        self.bias = nn.Parameter(torch.zeros(layers, 1, num_classes))

    def forward(self, pooled_LBPD: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, pooled_LBPD[:, :, self._parts].flatten(2), self.weight)
