"""Ray clusters of several nodes on this machine, and folders with distribution acme-toy for their paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["acme_toy", "cluster"]

NODES = """
import json, sys
from ray.cluster_utils import Cluster
from slime_core.runtime.session import agents_in_background

# On loopback, under an address that Ray does not replace with the machine's outer one, as it does 127.0.0.1.
cluster = Cluster()
with agents_in_background():
    for options in json.loads(sys.argv[1]):
        cluster.add_node(node_ip_address="127.0.0.2", num_cpus=1, include_dashboard=False, **options)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
HOOKS = """
from slime_core import hookimpl


@hookimpl
def slime_register(add):
    add.reward_model("length", "acme_toy.code:Length")
"""


def acme_toy(folder: Path, *, version: str = "1.0", code: str = "class Length: pass\n") -> Path:
    """``folder`` with distribution acme-toy, as an installer leaves it."""
    info = folder / f"acme_toy-{version}.dist-info"
    for path in (info, folder / "acme_toy"):
        path.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-toy\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[slime]\ntoy = acme_toy.plugin\n")
    (folder / "acme_toy" / "__init__.py").touch()
    (folder / "acme_toy" / "plugin.py").write_text(HOOKS)
    (folder / "acme_toy" / "code.py").write_text(code)
    return folder


@contextmanager
def cluster(*nodes: dict[str, Any]) -> Iterator[str]:
    """The address of a cluster of nodes with these options of Ray's ``add_node``; the first one is the head."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # which Megatron sets in a process that loads it
    helper = subprocess.Popen(
        [sys.executable, "-c", NODES, json.dumps(nodes)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with helper:
        assert helper.stdin is not None
        assert helper.stdout is not None
        address = next((line.strip() for line in helper.stdout if line.startswith("127.0.0.2:")), "")
        assert address
        yield address
        helper.stdin.close()
        helper.wait(timeout=900)
