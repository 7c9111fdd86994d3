"""Where the processes of an update group meet."""

from __future__ import annotations

import socket
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from slime_core.weights.engine_control import reserve_port, serve_store
from tests.ports import kept_port

LIMIT = timedelta(seconds=60)


def test_a_store_listens_on_its_own_address_only() -> None:
    store = serve_store("127.0.0.1", world_size=2, timeout=LIMIT)
    listening = [one.laddr for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"]
    assert [one.ip for one in listening if one.port == store.port] == ["127.0.0.1"]


def test_other_ranks_connect_to_a_store_at_a_given_port() -> None:
    with kept_port() as port:
        store = serve_store("127.0.0.1", world_size=2, timeout=LIMIT, port=port)
    TCPStore("127.0.0.1", port, 2, is_master=False, timeout=LIMIT).set("rank", "1")
    assert store.get("rank") == b"1"


def test_a_reserved_port_is_taken_only_by_the_store_it_was_reserved_for() -> None:
    port = reserve_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    store = serve_store("127.0.0.1", world_size=2, timeout=LIMIT, port=port)
    assert store.port == port
    TCPStore("127.0.0.1", port, 2, is_master=False, timeout=LIMIT).set("met", "here")
    assert store.get("met") == b"here"
