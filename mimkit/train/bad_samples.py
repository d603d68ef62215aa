"""Bad samples that others stood in for: counted over ranks and starts of a run, up to a limit."""

import torch

from mimkit.errors import found_by_all
from mimkit.train.metrics import Sums

NAME = "substituted_samples"  # in metrics, summary and meters
_A_FEW = 10  # never fatal, unless none is allowed


class BadSamples:
    """The count of a run. It travels with the meters' sums, so all ranks have it at the same update
    and decide alike.

    Args:
        before: counted up to the checkpoint that the run goes on from.
        allowed: share of the samples drawn; more of them, and more than ten, are too many.
        speaks: whether this rank tells the whole story (rank 0).
    """

    def __init__(self, *, before: int, allowed: float, speaks: bool) -> None:
        self.total = before
        self._allowed, self._speaks = allowed, speaks
        self._unshared = 0

    @property
    def unshared(self) -> int:
        """What this rank met with and has not told the others yet."""
        return self._unshared

    def note(self, count: int) -> None:
        """Adds what this rank met with."""
        self._unshared += count

    def news(self, device: torch.device) -> Sums:
        """What this rank met with since it was last asked, for the exchange between ranks."""
        news, self._unshared = self._unshared, 0
        return {NAME: (torch.tensor(news, device=device), 0)}

    def settle(self, news: float, *, drawn: int) -> None:
        """Adds the news of all ranks.

        Args:
            drawn: samples in all updates so far.

        Raises:
            UserError: on every rank, if there are too many.
        """
        self.total += round(news)
        most = max(self._allowed * drawn, _A_FEW) if self._allowed else 0
        if self.total <= most:
            return
        raise found_by_all(
            f"{self.total} of the {drawn} samples drawn so far could not be decoded, and others "
            f"stood in for them; data.max_bad_samples={self._allowed:g} allows {most:g}. The "
            "warnings above name the first. Leave them out with tools/make_shards.py; or go on "
            "from the last checkpoint by the same command with a higher data.max_bad_samples",
            speaks=self._speaks,
        )
