"""A port that is free, and stays so until whoever it is meant for listens there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_port"]


@contextmanager
def kept_port() -> Iterator[int]:
    """A loopback port that the operating system gives to nobody else; a server that reuses addresses can take it."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]
