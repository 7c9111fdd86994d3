"""One address for all engines: the sglang-router, as a child process.

sglang-router and not its successor smg: it does what is needed here, and applies a removal at once where smg takes
seconds and refuses to take the engine back meanwhile. A request costs no measurable time more through it (256 samples
in 32 requests on two cores: 0.40 s through it, 0.39 s directly), so there is no second way past it.

Health checks ask ``/model_info``, not ``/health``: while an engine is paused for new weights, ``/health`` hangs for 20
s and turns 503, and the router would take the engine out. ``/model_info`` is answered by the server's front process,
which ends when the scheduler behind it dies, so a dead engine is still noticed. A scheduler that hangs is not: the
limits of the waits on top of it end that.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.config.serving import RouterPolicy, WorkerType
from slime_core.errors import EngineError
from slime_core.rollout.engines.remote_router import ask_router
from slime_core.rollout.engines.server import Server

__all__ = ["Router", "RouterSettings", "Worker"]

# The launcher imports sglang, and with it torch, for a tracing mode that is not used, and goes without where there is
# none (sglang_router 0.3.2, mini_lb.py:21). Without: 0.7 s instead of 2 s to start.
# Its parser knows fewer policies than the router itself, so the policy comes first and apart.
LAUNCH = (
    "import sys; sys.modules['sglang'] = None; from sglang_router import launch_router as launcher; "
    "arguments = launcher.parse_router_args(sys.argv[2:]); arguments.policy = sys.argv[1]; "
    "launcher.launch_router(arguments)"
)
REGISTRATION_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How the router is started.

    Arguments:
        log_file: receives what the router prints.
        host: address to listen on.
        policy: how engines are chosen. ``cache_aware`` sends what shares a beginning to the same engine, as long as
            loads are even; ``consistent_hashing`` and ``manual`` what has the same header ``x-smg-routing-key``.
        splits_prefill: its engines do either prefill or decode, and each request goes to one of both.
        health_endpoint: what an engine is asked; see the module for why not ``/health``.
        health_interval_s: seconds between two looks at each engine.
        health_failures: looks in a row that must fail before an engine gets no more requests.
        request_timeout_s: seconds until an answer must be complete, pauses included.
        start_timeout_s: seconds until the router must be ready, and as many until it has taken engines in.
    """

    log_file: Path
    host: str = "127.0.0.1"
    policy: RouterPolicy = "cache_aware"
    splits_prefill: bool = False
    health_endpoint: str = "/model_info"
    health_interval_s: int = 5
    health_failures: int = 2
    request_timeout_s: int = 14_400
    start_timeout_s: float = 60.0

    def arguments(self, *, port: int, metrics_port: int, workers: Sequence[str]) -> list[str]:
        """Arguments of ``sglang_router.launch_router``."""
        valued = {
            "host": self.host,
            "port": port,
            "prometheus-host": self.host,
            "prometheus-port": metrics_port,
            "log-level": "warn",
            "health-check-endpoint": self.health_endpoint,
            "health-check-interval-secs": self.health_interval_s,
            "health-check-timeout-secs": self.health_interval_s,
            "health-failure-threshold": self.health_failures,
            "health-success-threshold": 1,
            "request-timeout-secs": self.request_timeout_s,
            "worker-startup-check-interval": 1,
            # Every request in flight is bounded by the client already; a second queue would only hide that.
            "max-concurrent-requests": -1,
        }
        return [
            *(f"--{name}={value}" for name, value in valued.items()),
            # Who asks also asks again: the router would do so after 408 and 429 too, and nobody could count it.
            "--disable-retries",
            *(["--pd-disaggregation"] if self.splits_prefill else []),
            *(["--worker-urls", *workers] if workers else []),
        ]


@dataclass(frozen=True, slots=True)
class Worker:
    """An engine as a router knows it.

    Arguments:
        url: its address.
        worker_type: what it does of a request.
        bootstrap_port: of a prefill engine, where decode engines fetch the cache; 0: it is none.
    """

    url: str
    worker_type: WorkerType = "regular"
    bootstrap_port: int = 0

    @property
    def entry(self) -> dict[str, Any]:
        """What the router is told; of an engine that does whole requests the address alone."""
        if self.worker_type == "regular":
            return {"url": self.url}
        port = {"bootstrap_port": self.bootstrap_port} if self.worker_type == "prefill" else {}
        return {"url": self.url, "worker_type": self.worker_type, **port}


class Router(Server):
    """Sends each request to one of ``workers``, as ``settings`` say.

    Arguments:
        settings: of the router.
        workers: URLs of engines that are ready.
    """

    # Neither /health, which says 200 without any engine, nor /readiness, which logs an error every time it says no.
    probe = "/liveness"

    def __init__(self, settings: RouterSettings, workers: Sequence[str] = ()) -> None:
        self.settings = settings
        self._workers = list(workers)
        super().__init__(
            "router",
            host=settings.host,
            env={**os.environ, "NO_COLOR": "1"},
            log_file=settings.log_file,
            start_timeout_s=settings.start_timeout_s,
        )

    def command(self, port: int, second: int) -> list[str]:
        """As :meth:`Server.command`; on ``second`` it tells its metrics."""
        arguments = self.settings.arguments(port=port, metrics_port=second, workers=self._workers)
        return [sys.executable, "-c", LAUNCH, self.settings.policy, *arguments]

    def wait_ready(self) -> None:
        """As :meth:`Server.wait_ready`, and it passes requests on to all engines.

        Raises:
            EngineError: it died, or an engine was not taken in within ``start_timeout_s``.
        """
        super().wait_ready()
        self._wait_workers()

    def add(self, *workers: str | Worker) -> None:
        """The engines ``workers``, or at these addresses, get requests too.

        Raises:
            EngineError: the router refused one, or did not take all in within ``start_timeout_s``.
        """
        for worker in workers:
            one = Worker(worker) if isinstance(worker, str) else worker
            self._call("POST", "/workers", one.entry)
            self._workers.append(one.url)
        self._wait_workers()

    def remove(self, worker: str) -> None:
        """The engine at ``worker`` gets no further requests.

        Raises:
            EngineError: the router does not know it.
        """
        known = {entry["url"]: entry["id"] for entry in self._entries()}
        if worker not in known:
            raise EngineError(f"Asked the router to remove {worker}; it knows {sorted(known)}")
        self._call("DELETE", f"/workers/{known[worker]}")
        self._workers.remove(worker)

    def healthy_workers(self) -> list[str]:
        """URLs of the engines that get requests now."""
        return sorted(entry["url"] for entry in self._entries() if entry["is_healthy"])

    def _wait_workers(self) -> None:
        deadline_s = time.monotonic() + self.settings.start_timeout_s
        while missing := sorted(set(self._workers) - set(self.healthy_workers())):
            if time.monotonic() > deadline_s:
                raise EngineError(f"The router at {self.url} did not take in {missing}: {self._process.last_lines(3)}")
            time.sleep(REGISTRATION_POLL_S)

    def _entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._call("GET", "/workers")["workers"]
        return entries

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        self.check_alive()
        return ask_router(self.url, method, path, body)
