"""Several nodes, simulated on this machine: Ray with two that have other plugins than the driver, SGLang over two."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_core.config.schema import ARITHMETIC
from slime_core.rollout.engines.server import free_ports
from slime_core.weights.engine_control import call
from tests.e2e.conftest import BRIEF, LIMIT_S, slime, train
from tests.external_engine import answers
from tests.nodes import acme_toy, cluster

pytestmark = pytest.mark.long


@dataclass(frozen=True, slots=True)
class Nodes:
    """A cluster, and the folder that its head and the driver have on their path."""

    address: str
    driver: Path


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Three nodes: one like the driver, one with another version, one with other content under the same version."""
    driver = acme_toy(tmp_path / "driver")
    newer = acme_toy(tmp_path / "newer", version="2.0")
    edited = acme_toy(tmp_path / "edited", code="class Length: changed = True\n")
    with cluster(*({"env_vars": {"PYTHONPATH": str(path)}} for path in (driver, newer, edited))) as address:
        yield Nodes(address, driver)


def test_every_difference_of_every_node_is_in_one_table_and_nothing_is_started(nodes: Nodes, tmp_path: Path) -> None:
    words = ("run", "--plugin", "grpo", "--plugin", "toy", "--ray-address", nodes.address)
    run = slime(tmp_path, *words, "--output-dir", tmp_path / "run", PYTHONPATH=str(nodes.driver))
    assert run.code == 2, run.errors
    lines = run.errors[run.errors.index("slime: ") :].splitlines()
    assert lines[0].startswith("slime: 2 of 3 nodes ")
    assert lines[1].split() == ["node", "plugin", "driver", "node", "has"]
    edited, newer = sorted(lines[2:4], key=lambda line: "acme-toy 2.0" in line)
    assert "  toy     acme-toy 1.0 " in newer
    assert "  acme-toy 2.0 " in newer
    assert edited.count("acme-toy 1.0 ") == 2
    assert len(lines) == 5
    assert not (tmp_path / "run").exists()


def test_a_server_over_several_nodes_is_an_engine_that_gets_the_weights(tmp_path: Path) -> None:
    """Two node ranks of a real SGLang server with one process each; only rank 0 takes requests."""
    model = ARITHMETIC / "model"
    meeting, *ports = free_ports(3)
    words = [sys.executable, "-m", "slime_cpu.serve", "--model-path", model, "--dtype", "float32", "--tp", "2"]
    words += ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{meeting}", "--skip-server-warmup"]
    servers: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(end, servers)
        for rank, port in enumerate(ports):
            log = stack.enter_context((tmp_path / f"node-{rank}.log").open("w"))
            command = [*words, "--node-rank", rank, "--port", port]
            servers.append(subprocess.Popen(list(map(str, command)), stdout=log, stderr=log))
        first, second = (f"http://127.0.0.1:{port}" for port in ports)
        ended_s = time.monotonic() + LIMIT_S
        while not answers(first):
            assert time.monotonic() < ended_s, (tmp_path / "node-0.log").read_text()[-3000:]
            time.sleep(1)
        call(second, "/health", timeout_s=10)
        assert not answers(second)
        engine = ("--rollout-external-engine-addrs", f"127.0.0.1:{ports[0]}", "--rollout-num-gpus-per-engine", "2")
        more = ("--rollout-num-gpus", "2", "--num-rollout", "2", "--check-weight-update-equal", *BRIEF)
        run = train(tmp_path / "run", "--device", "cpu", *engine, *more)
    assert all(row["train/grad_norm"] > 0 and row["parity/mean"] < 1e-5 for row in run.rows)


def end(servers: list[subprocess.Popen[bytes]]) -> None:
    """Rank 1 waits for rank 0 to end, so all are told first."""
    for server in servers:
        server.terminate()
    for server in servers:
        server.wait(timeout=600)
