"""What may pass by itself is tried again, some times and no more."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mimkit.errors import UserError

_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class TransientError(Exception):
    """A dropped connection, a timeout, a server's own trouble, an answer that is cut short."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often something is tried, and how long is waited in between: 0.5, 1, ... 16 s.

    Args:
        first_wait: seconds; every wait is twice the one before.
    """

    tries: int = 7
    first_wait: float = 0.5
    sleep: Callable[[float], None] = time.sleep

    def insist(self, action: Callable[[], Result], *, what: str) -> Result:
        """What `action` gives. Raises UserError after the last TransientError."""
        for number in range(self.tries):
            try:
                return action()
            except TransientError as error:
                last = error
            if number + 1 < self.tries:
                _LOG.warning("%s failed (%s); try %d of %d", what, last, number + 2, self.tries)
                self.sleep(self.first_wait * 2**number)
        raise UserError(
            f"{what} failed {self.tries} times, the last time with: {last}. Check the address and "
            "the connection; then the same command goes on from what was fetched."
        ) from last
