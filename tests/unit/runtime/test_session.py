"""Parts of a Ray session that need no cluster."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private import worker
from ray._private.node import Node
from ray._private.parameter import RayParams

from slime_core.errors import NodeDied, PlacementError
from slime_core.plugins.manifest import Difference
from slime_core.runtime import session
from slime_core.runtime.session import Session, _probe, labels, mismatch_text
from tests.processes import DELIVERED_S, left_of


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files is a short one, wherever the tests run."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")


@pytest.fixture
def handler() -> Iterator[Any]:
    def ours(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, ours)
    yield ours
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("address", ["local", "auto"])
def test_the_handler_of_sigterm_survives_the_start_of_ray(
    address: str, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(signal.signal(signal.SIGTERM, signal.SIG_IGN)))
    with Session(address, namespace="n"):
        assert seen == [handler]
        assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(("address", "left_out"), [("local", 3), ("auto", 0)])
def test_only_its_own_cluster_leaves_out_services_without_clients(
    address: str, left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = [vars(Node)[name] for name in session.UNUSED_SERVICES]
    seen: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda **_: seen.extend(vars(Node)[name] for name in session.UNUSED_SERVICES))
    with Session(address, namespace="n"):
        assert sum(one is not method for one, method in zip(seen, methods, strict=True)) == left_out
    assert [vars(Node)[name] for name in session.UNUSED_SERVICES] == methods


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer to answer."""
    monkeypatch.setattr(session, "PROBE_LIMIT_S", 120.0)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a program that sends ``answer`` to every connection."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(64)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_a_program_that_greets_as_grpc_does_may_be_ray() -> None:
    with answering(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as address:
        _probe(address)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"220"])
def test_a_program_that_is_not_ray_is_reported_at_once(answer: bytes) -> None:
    with answering(answer) as address, pytest.raises(ValueError, match="gRPC"):
        _probe(address)


def test_ray_that_does_not_start_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(**_: object) -> None:
        raise Exception("it timed out")

    monkeypatch.setattr(ray, "init", too_slow)
    with pytest.raises(PlacementError, match=r"^Ray: .*it timed out"):
        Session("local", namespace="test").__enter__()


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), SystemExit(1)], ids=["Ctrl-C", "SIGTERM, by Ray's own handler"])
def test_a_start_that_is_broken_off_leaves_no_service(ended: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    services = []

    def broken_off(**_: object) -> None:
        services.append(subprocess.Popen(["sleep", "600"]))
        raise ended

    monkeypatch.setattr(ray, "init", broken_off)
    monkeypatch.setattr(session, "LEFTOVER_GRACE_S", 0.1)
    with pytest.raises(KeyboardInterrupt):
        Session("local", namespace="test").__enter__()
    assert left_of(services[0].pid) == []


GREETING = "import time; time.sleep(600)"


@pytest.mark.parametrize(("name", "is_needed"), [("raylet", True), ("gcs_server", True), ("wandb-core", False)])
def test_a_dead_service_of_its_own_cluster_is_the_death_of_ray(
    name: str, is_needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(get_logs_dir_path=lambda: "/tmp/ray/logs"))
    service = subprocess.Popen([sys.executable, "-c", GREETING])
    own = Session("local", namespace="n")
    own._services = {psutil.Process(service.pid): name}
    own.check_alive()
    service.kill()
    service.wait()
    if not is_needed:
        own.check_alive()
        return
    with pytest.raises(NodeDied, match=rf"^Ray died: its process {name} \({service.pid}\) has ended\."):
        own.check_alive()


def test_an_agent_ends_with_its_raylet_and_keeps_its_command_line() -> None:
    agent = [sys.executable, "-c", GREETING, "--log-dir=/tmp/a b"]
    word = f"--dashboard_agent_command={subprocess.list2cmdline(agent)}"
    command = shlex.split(session._changed_for_run(word).partition("=")[2])
    assert session._changed_for_run("--session_dir=/tmp/x") == "--session_dir=/tmp/x"
    assert session._changed_for_run("--num_prestart_python_workers=16") == "--num_prestart_python_workers=0"
    raylet = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, *command], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert raylet.stdout is not None
    started = psutil.Process(int(raylet.stdout.readline()))
    deadline_s = time.monotonic() + DELIVERED_S
    while started.cmdline() != agent and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert started.cmdline() == agent
    raylet.kill()
    raylet.communicate()
    assert left_of(started) == []


START_AND_WAIT = """
import os, subprocess, sys
os.environ["RAY_RAYLET_PID"] = str(os.getpid())
print(subprocess.Popen(sys.argv[1:]).pid, flush=True)
sys.stdin.read()
"""


VERSION = Difference("acme", "acme-tree 2.1 aaaa", "acme-tree 2.0 bbbb")
CONTENT = Difference("grpo", "slime-grpo 0.1.0 cccc", "slime-grpo 0.1.0 dddd")


def test_all_differences_of_all_nodes_are_one_table_and_broken_plugins_follow():
    differing = {"two (10.0.0.2)": [VERSION, CONTENT], "three (10.0.0.3)": [CONTENT]}
    broken = {"four (10.0.0.4)": "plugin 'acme' (acme-tree 2.1): importing acme failed"}
    title, _, *rows, _, last = mismatch_text(differing, broken, total=5).splitlines()
    assert title.startswith("3 of 5 nodes ")
    expected = [[node, *one] for node, found in differing.items() for one in found]
    assert [re.split("  +", row.strip()) for row in rows] == expected
    assert last == f"on node four (10.0.0.4): {broken['four (10.0.0.4)']}"


def test_a_node_is_called_by_host_and_address_and_by_its_id_where_two_share_those():
    nodes = [
        {"NodeID": "aaaaaaaaaaaa", "NodeManagerHostname": "one", "NodeManagerAddress": "10.0.0.1"},
        {"NodeID": "bbbbbbbbbbbb", "NodeManagerHostname": "two", "NodeManagerAddress": "10.0.0.2"},
        {"NodeID": "cccccccccccc", "NodeManagerHostname": "two", "NodeManagerAddress": "10.0.0.2"},
    ]
    assert list(labels(nodes).values()) == ["one (10.0.0.1)", "two (10.0.0.2) bbbbbbbb", "two (10.0.0.2) cccccccc"]


def test_nodes_of_its_own_cluster_do_not_wait_for_ports_of_agents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[RayParams] = []

    def start_raylet(node: Any) -> None:
        started.append(node._ray_params)

    def init(**_: object) -> None:
        for _ in range(2):
            node = SimpleNamespace(_ray_params=RayParams(), _session_dir=str(tmp_path), _node_id="ab" * 28)
            Node.start_raylet(node)
            assert (tmp_path / f"dashboard_agent_listen_port_{node._node_id}").read_text() == "-1"

    monkeypatch.setattr(Node, "start_raylet", start_raylet)
    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("", 0)) as taken:
        ports = range(taken.getsockname()[1] - 20, taken.getsockname()[1] + 20)
        monkeypatch.setattr(session, "AGENT_PORTS", ports)
        session._agent_ports.cache_clear()
        with Session("local", namespace="n"):
            assert Node.start_raylet is start_raylet
        session._agent_ports.cache_clear()
        given = [port for one in started for port in (one.metrics_agent_port, one.metrics_export_port)]
        given += [one.runtime_env_agent_port for one in started]
        assert len(set(given)) == 6
        assert set(given) <= set(ports) - {taken.getsockname()[1]}
