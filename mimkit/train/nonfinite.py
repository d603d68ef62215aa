"""What becomes of an update whose gradient is not finite."""

from collections.abc import Callable
from typing import Literal, NoReturn

import torch
from torch import nn

from mimkit.errors import found_by_all

Policy = Literal["stop", "skip", "rollback"]
NAME = "nonfinite_updates"  # in metrics and summary
REMEDY = (
    "a lower train.lr, a smaller train.clip_grad (0 clips nothing) or, where it is bf16, "
    "engine.precision=fp32 (that makes another run, in a folder of its own)"
)


class NonFinite:
    """Decides on every rank alike: the gradient's norm is that of all of them.

    The update itself was not made: weights and moments are those before it.

    Args:
        policy: stop; skip, which goes on with the next batch; or rollback, which goes back to the
            last checkpoint's weights and on with the next batch.
        allowed: so many in the whole run; one more stops it.
        before: so many were there up to the checkpoint that the run goes on from.
        told: called first, with every update that was not made.
        go_back: takes the number of the update, returns that of the checkpoint it has loaded.
        speaks: whether this rank tells the whole story (rank 0).
    """

    def __init__(
        self,
        *,
        policy: Policy = "stop",
        allowed: int = 0,
        before: int = 0,
        told: Callable[[], None] = lambda: None,
        go_back: Callable[[int], int] | None = None,
        speaks: bool = True,
    ) -> None:
        self.policy, self.total = policy, before
        self._allowed, self._speaks = allowed, speaks
        self._told, self._go_back = told, go_back
        self._statistics: list[torch.Tensor] = []

    def keep_statistics(self, model: nn.Module) -> None:
        """Before an update: a forward pass of NaN would stay in batch norms' running statistics."""
        if self.policy != "stop":
            self._buffers = list(model.buffers())
            self._statistics = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def settle(self, done: int) -> int:
        """The updates to go on from, after number `done` was not made.

        Raises:
            UserError: on every rank, where the policy is to stop or there were too many.
        """
        self.total += 1
        self._told()
        if self.policy == "stop":
            self._stop(
                f"not finite at update {done}: grad_norm; the update was not made and no "
                f"checkpoint is written of it. Start again with {REMEDY}; or give the same command "
                "with train.on_nonfinite=skip or rollback, which goes on from the last checkpoint"
            )
        if self.total > self._allowed:
            self._stop(f"the gradients of {self.total} updates were not finite, the last one at "
                       f"update {done}; train.max_nonfinite={self._allowed}. Start again with "
                       f"{REMEDY}, or allow more")  # fmt: skip
        if self.policy == "skip":
            for buffer, kept in zip(self._buffers, self._statistics, strict=True):
                buffer.copy_(kept)
            return done
        assert self._go_back is not None
        return self._go_back(done)

    def _stop(self, why: str) -> NoReturn:
        raise found_by_all(why, speaks=self._speaks)
