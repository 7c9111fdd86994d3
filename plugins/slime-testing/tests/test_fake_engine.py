"""The fake engine leaves no socket open, even when a client connects while it stops."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import warnings

from slime_testing.fake_engine import FakeEngine


def test_a_connection_made_while_it_stops_is_closed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # objects that other tests have left
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(10):
            stop_while_clients_knock()
        gc.collect()
    assert [str(one.message) for one in seen] == []


def stop_while_clients_knock() -> None:
    engine = FakeEngine()
    engine.start()
    address = ("127.0.0.1", int(engine.url.rsplit(":", 1)[1]))
    knocked = threading.Event()

    def knock() -> None:
        with contextlib.suppress(OSError):
            while True:
                with socket.create_connection(address, timeout=1):
                    knocked.set()

    client = threading.Thread(target=knock)
    client.start()
    knocked.wait(60)
    engine.stop()
    client.join()
