"""Numbers as people read them."""

from mimkit.bench.timing import Spread


def shown(spread: Spread, digits: int = 2) -> str:
    """`1.07 (1.04 to 1.09)`."""
    median, least, most = (f"{value:.{digits}f}" for value in spread)
    return f"{median} ({least} to {most})"
