"""Reserves a free port until the server under test listens on it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_port"]


@contextmanager
def kept_port() -> Iterator[int]:
    """A loopback port that the kernel assigns to no other process; a server that sets SO_REUSEADDR can bind it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
