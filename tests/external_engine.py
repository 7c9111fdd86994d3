"""A server as a user starts one for runs that are given its address."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import WeightSyncError
from slime_core.rollout.engines.server import free_ports
from slime_core.weights.engine_control import call

__all__ = ["answers", "end", "served"]

START_LIMIT_S = 600
"""Against hanging; an idle machine needs a fiftieth."""


@contextmanager
def served(log: Path) -> Iterator[tuple[psutil.Popen, str]]:
    """A server of the built-in model in fp32, as docs/engines.md starts one, and its URL."""
    (port,) = free_ports(1, host="127.0.0.1")
    words = ["--model-path", str(ARITHMETIC / "model"), "--port", str(port), "--dtype", "float32"]
    with log.open("wb") as output:
        command = [sys.executable, "-m", "slime_cpu.serve", *words]
        server = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    deadline_s = time.monotonic() + START_LIMIT_S
    try:
        while not answers(url):
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise TimeoutError(f"the server does not answer; see {log}")
            time.sleep(0.1)
        yield server, url
    finally:
        end(server)


def answers(url: str) -> bool:
    """Whether the server takes requests."""
    with suppress(WeightSyncError):
        return bool(call(url, "/model_info", timeout_s=5))
    return False


def end(server: psutil.Popen) -> None:
    """Nothing of it is left."""
    with suppress(psutil.NoSuchProcess):
        for process in [*server.children(recursive=True), server]:
            process.kill()
        server.wait(60)
