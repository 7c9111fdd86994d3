"""``--device auto`` on a Ray cluster that is joined, on real Ray: its nodes decide, not the torch of the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray

from slime_core.cli.main import main
from slime_core.config.load import load
from slime_core.runtime.layout import device_of
from slime_core.runtime.session import Session, gpus_at

NODES = """
import sys
from ray.cluster_utils import Cluster
from slime_core.runtime.session import agents_in_background

# On loopback, under an address that Ray does not replace with the machine's outer one, as it does 127.0.0.1.
cluster = Cluster()
with agents_in_background():
    for gpus in (0, 4):
        cluster.add_node(node_ip_address="127.0.0.2", num_cpus=1, num_gpus=gpus, include_dashboard=False)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head without a GPU, as of the driver, and a node with four."""
    helper = subprocess.Popen(
        [sys.executable, "-c", NODES],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert helper.stdout is not None
    yield helper.stdout.readline().strip()
    helper.communicate()


def test_the_nodes_of_the_cluster_decide(address):
    config = load(["--ray-address", address], check_rules=False).config
    assert gpus_at(address) == 4
    assert not ray.is_initialized()
    with Session(address, namespace="run"):  # as the run that follows
        assert device_of(config) == "gpu"
        assert gpus_at(f"{address}/") == 4  # asked while joined
        assert ray.is_initialized()


def test_check_says_what_auto_means_there(address, capsys):
    assert main(["check", "--plugin", "grpo", "--ray-address", address]) == 0
    out = capsys.readouterr().out
    assert f"device auto: cuda, because the nodes of the Ray cluster at {address} have 4 GPUs" in out
    assert "2 bundles of 1 GPU + 1 CPU" in out


def test_a_cluster_that_does_not_answer_is_not_joined():
    assert gpus_at("127.0.0.1:1") is None
    assert not ray.is_initialized()
