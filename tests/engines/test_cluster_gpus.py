"""``--device auto`` on a Ray cluster that is joined, on real Ray: its nodes decide, not the torch of the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

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
    asked = in_a_new_process(
        f"""
        import ray
        from slime_core.config.load import load
        from slime_core.runtime.layout import device_of
        from slime_core.runtime.session import Session, gpus_at

        config = load(["--ray-address", "{address}"], check_rules=False).config
        print(gpus_at("{address}"), ray.is_initialized())
        with Session("{address}", namespace="run"):  # as the run that follows
            print(device_of(config), gpus_at("{address}/"), ray.is_initialized())
        """
    )
    assert asked == "4 False\ngpu 4 True\n"


def test_check_says_what_auto_means_there(address):
    words = ["check", "--plugin", "grpo", "--ray-address", address]
    out = in_a_new_process(f"from slime_core.cli.main import main; assert main({words}) == 0")
    assert "device auto: cuda\n" in out
    assert "2 bundles of 1 GPU + 1 CPU" in out


def test_a_cluster_that_does_not_answer_is_not_joined():
    asked = in_a_new_process(
        """
        import ray
        from slime_core.runtime.session import gpus_at

        print(gpus_at("127.0.0.1:1"), ray.is_initialized())
        """
    )
    assert asked == "None False\n"


def in_a_new_process(code: str) -> str:
    """What ``code`` prints. This process may have joined the cluster that other tests share, and Ray joins only one."""
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout
