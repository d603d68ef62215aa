"""A port where the ranks of one run meet."""

import socket


def free_port() -> int:
    """One that nobody listens on now, on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
