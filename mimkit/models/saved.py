"""What autograd keeps between forward and backward: counted, the same on every device."""

from types import TracebackType

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class SavedForBackward:
    """`with SavedForBackward(model) as saved: loss = ...` -> `saved.num_bytes`.

    Storages are counted once, and weights not at all. Keep the output until it is asked for: what
    autograd has freed leaves its address to others.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self._storages: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        return sum(self._storages.values())

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            self._storages[storage._cdata] = storage.nbytes()
        return tensor

    def __enter__(self) -> "SavedForBackward":
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
