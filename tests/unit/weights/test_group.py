"""Where the processes of an update group meet."""

from __future__ import annotations

from datetime import timedelta

import psutil
from torch.distributed import TCPStore

from slime_core.weights.group import listening_store

LIMIT = timedelta(seconds=10)


def test_a_store_listens_on_its_own_address_only() -> None:
    store = listening_store("127.0.0.1", world_size=2, timeout=LIMIT)
    listening = [one.laddr for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"]
    assert [one.ip for one in listening if one.port == store.port] == ["127.0.0.1"]


def test_others_meet_in_a_store_whose_port_was_agreed_on() -> None:
    port = listening_store("127.0.0.1", world_size=2, timeout=LIMIT).port
    store = listening_store("127.0.0.1", world_size=2, timeout=LIMIT, port=port)
    TCPStore("127.0.0.1", port, 2, is_master=False, timeout=LIMIT).set("rank", "1")
    assert store.get("rank") == b"1"
