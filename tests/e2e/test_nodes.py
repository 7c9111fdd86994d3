"""Several nodes, simulated on this machine: Ray with two that have other plugins than the driver, SGLang over two."""

from __future__ import annotations

import http.client
import os
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
from tests.e2e.conftest import BRIEF, LIMIT_S, Finished, command, train

pytestmark = pytest.mark.long

NODES = """
import sys
from ray.cluster_utils import Cluster
from slime_core.runtime.session import agents_in_background

# On loopback, under an address that Ray does not replace with the machine's outer one, as it does 127.0.0.1.
cluster = Cluster()
with agents_in_background():
    for path in sys.argv[1:]:
        environment = {"PYTHONPATH": path}
        cluster.add_node(node_ip_address="127.0.0.2", num_cpus=1, env_vars=environment, include_dashboard=False)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
HOOKS = """
from slime_core import Component, hookimpl


@hookimpl
def slime_register_reward_models():
    yield Component("length", target="acme_toy.code:Length")
"""


@dataclass(frozen=True, slots=True)
class Nodes:
    """A cluster, and the folder that its head and the driver have on their path."""

    address: str
    driver: Path


def site(folder: Path, *, version: str = "1.0", code: str = "class Length: pass\n") -> Path:
    """A folder with distribution acme-toy, as an installer leaves it."""
    info = folder / f"acme_toy-{version}.dist-info"
    for path in (info, folder / "acme_toy"):
        path.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-toy\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[slime]\ntoy = acme_toy.plugin\n")
    (folder / "acme_toy" / "__init__.py").touch()
    (folder / "acme_toy" / "plugin.py").write_text(HOOKS)
    (folder / "acme_toy" / "code.py").write_text(code)
    return folder


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Three nodes: one like the driver, one with another version, one with other content under the same version."""
    driver = site(tmp_path / "driver")
    others = [site(tmp_path / "newer", version="2.0"), site(tmp_path / "edited", code="class Length: changed = True\n")]
    helper = subprocess.Popen(
        [sys.executable, "-c", NODES, *map(str, [driver, *others])],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with helper:
        assert helper.stdin is not None
        assert helper.stdout is not None
        address = next((line.strip() for line in helper.stdout if line.startswith("127.0.0.2:")), "")
        assert address
        yield Nodes(address, driver)
        helper.stdin.close()
        helper.wait(timeout=LIMIT_S)


def slime_on(nodes: Nodes, folder: Path) -> Finished:
    words = command(
        "run", "--plugin", "grpo", "--plugin", "toy", "--ray-address", nodes.address, "--output-dir", folder
    )
    environment = {**os.environ, "PYTHONPATH": str(nodes.driver)}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    return Finished(ended.returncode, ended.stdout, ended.stderr, folder)


def test_every_difference_of_every_node_is_in_one_table_and_nothing_is_started(nodes: Nodes, tmp_path: Path):
    run = slime_on(nodes, tmp_path / "run")
    assert run.code == 2, run.errors
    lines = run.errors[run.errors.index("slime: ") :].splitlines()
    assert lines[0].startswith("slime: 2 of 3 nodes ")
    assert lines[1].split() == ["node", "plugin", "driver", "found", "there", "differs", "in"]
    newer, edited = sorted(lines[2:4], key=lambda line: "content" in line)
    assert "  toy     acme-toy 1.0 " in newer
    assert "  acme-toy 2.0 " in newer
    assert newer.endswith("  version")
    assert edited.endswith("  content of acme_toy/code.py")
    assert len(lines) == 5
    assert not (tmp_path / "run").exists()


def test_a_server_over_several_nodes_is_an_engine_that_gets_the_weights(tmp_path: Path) -> None:
    """Two node ranks of a real SGLang server with one process each; only rank 0 takes requests."""
    model = ARITHMETIC / "model"
    meeting, *ports = free_ports(3)
    words = [sys.executable, "-m", "slime_core.cpu.serve", "--model-path", model, "--dtype", "float32", "--tp", "2"]
    words += ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{meeting}", "--skip-server-warmup"]
    servers: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(end, servers)
        for rank, port in enumerate(ports):
            log = stack.enter_context((tmp_path / f"node-{rank}.log").open("w"))
            own = ["--node-rank", str(rank), "--port", str(port)]
            server = subprocess.Popen(list(map(str, [*words, *own])), stdout=log, stderr=log)
            servers.append(server)
        ended_s = time.monotonic() + LIMIT_S
        while not answers(ports[0], "/model_info"):
            assert time.monotonic() < ended_s, (tmp_path / "node-0.log").read_text()[-3000:]
            time.sleep(1)
        assert answers(ports[1], "/health")
        assert not answers(ports[1], "/model_info")
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


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
