"""One update under observation: where the first value appears that is not finite."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mimkit.tokenizers import VisualTokenizer


@dataclass(frozen=True)
class Origin:
    """Where something is not finite: `what` in words, and which rows of the batch, if some."""

    what: str
    rows: tuple[int, ...] = ()


@dataclass
class Watch:
    """What was seen in one update, in the order in which it happened."""

    origins: list[Origin] = field(default_factory=list)
    sample_losses: list[float] = field(default_factory=list)  # row by row of the global batch

    def note(
        self, what: str, value: Tensor, *, rows: int | None = None, first_row: int = 0
    ) -> bool:
        """Whether `value` is finite; else it is noted, with its rows where its first axis has
        `rows` of them."""
        if not value.is_floating_point() or bool(torch.isfinite(value).all()):
            return True
        bad: tuple[int, ...] = ()
        if rows is not None and value.ndim and len(value) == rows:
            finite_B = torch.isfinite(value).reshape(rows, -1).all(1)
            bad = tuple(first_row + int(row) for row in (~finite_B).nonzero().flatten())
        self.origins.append(Origin(what, bad))
        return False

    def parameters(self, model: nn.Module, *, when: str) -> bool:
        """Notes every parameter and buffer that is not finite."""
        named = [*model.named_parameters(), *model.named_buffers()]
        return all([self.note(f"{name}, {when}", value.detach()) for name, value in named])

    @contextmanager
    def forward(self, model: nn.Module, *, rows: int, first_row: int) -> Iterator[None]:
        """Notes modules whose output is not finite while their inputs are: where it begins."""
        handles = [
            module.register_forward_hook(self._hook(name or "the model", rows, first_row))
            for name, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, rows: int, first_row: int) -> Any:
        def seen(module: nn.Module, inputs: Any, output: Any) -> None:
            healthy = all(
                bool(torch.isfinite(value).all())
                for value in _tensors(inputs)
                if value.is_floating_point()
            )
            inside = any(o.what.startswith(f"{name}.") or name == "the model" for o in self.origins)
            if healthy and not inside:
                for value in _tensors(output):
                    kind = type(module).__name__
                    self.note(f"{name} ({kind})", value, rows=rows, first_row=first_row)

        return seen

    @contextmanager
    def backward(self, model: nn.Module) -> Iterator[None]:
        """Notes the parameters whose gradient is not finite, in the order of backward."""

        def hook(name: str) -> Any:
            def seen(parameter: Tensor) -> None:
                assert parameter.grad is not None
                self.note(f"the gradient of {name}", parameter.grad)

            return seen

        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(hook(n)) for n, p in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def losses(
        self, tokenizer: VisualTokenizer, predicted_MV: Tensor, target_M: Tensor, mask_BN: Tensor,
        *, first_row: int,
    ) -> None:  # fmt: skip
        """Of every sample by itself; notes targets and losses that are not finite."""
        counts = mask_BN.sum(1).tolist()
        pieces = zip(torch.split(predicted_MV.detach(), counts), torch.split(target_M, counts),
                     strict=True)  # fmt: skip
        for row, (predicted, target) in enumerate(pieces, first_row):
            if target.is_floating_point() and not torch.isfinite(target).all():
                self.origins.append(Origin("the tokenizer's targets", (row,)))
            loss = tokenizer.loss(predicted, target)
            self.sample_losses.append(float(loss))
            if not torch.isfinite(loss) and torch.isfinite(predicted).all():
                self.origins.append(Origin("the loss", (row,)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
