"""One address for all engines: sglang-router, as a child process (:class:`Router`) or external (:class:`RemoteRouter`).

sglang-router and not its successor smg: it removes an engine at once, where smg takes seconds and refuses to add the
engine again meanwhile. A request through it costs no measurable time (256 samples in 32 requests on two cores: 0.40 s
through it, 0.39 s directly), so engines are not addressed directly.

Health checks request ``/model_info``, not ``/health``: while an engine is paused for new weights, ``/health`` hangs for
20 s and returns 503, and the router would drop the engine. ``/model_info`` is answered by the server's HTTP process,
which ends when its scheduler dies, so the router still notices a dead engine. It does not notice a scheduler
that hangs; the timeouts of requests and waits do.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime_core.config.secrets import (
    ENGINE_KEY,
    engine_access,
    engine_headers,
    key_advice,
    needed_environment,
    send_key_to,
)
from slime_core.config.serving import RouterPolicy, WorkerType
from slime_core.errors import EngineError
from slime_core.rollout.engines.server import Server

__all__ = ["RemoteRouter", "Router", "RouterSettings", "Worker", "ask_router"]

# The launcher imports sglang, and with it torch, for a tracing mode that is not used here; the import is optional
# (sglang_router 0.3.2, mini_lb.py:21). Without it the router starts in 0.7 s instead of 2 s.
# The launcher's parser knows fewer policies than the router itself, so the policy is passed separately. The key of the
# run comes in the environment, because a command line is no secret. With a key, sglang_router 0.3.2 requires it for
# responses and for /workers, and passes the header of a request on to the engine.
LAUNCH = (
    "import os, sys; sys.modules['sglang'] = None; from sglang_router import launch_router as launcher; "
    "arguments = launcher.parse_router_args(sys.argv[2:]); arguments.policy = sys.argv[1]; "
    f"arguments.api_key = os.environ.pop('{ENGINE_KEY}', '') or None; "
    "launcher.launch_router(arguments)"
)
REGISTRATION_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How the router is started.

    Arguments:
        log_file: receives the router's output.
        host: address to listen on.
        policy: how engines are chosen. ``cache_aware`` sends prompts with a common prefix to the same engine, as long
            as loads are even; ``consistent_hashing`` and ``manual`` send requests with the same header
            ``x-smg-routing-key`` to the same engine.
        splits_prefill: its engines do either prefill or decode, and each request goes to one of each.
        health_endpoint: path of the health check; the module says why not ``/health``.
        health_interval_s: seconds between two health checks of an engine.
        health_failures: failed checks in a row after which an engine gets no more requests.
        request_timeout_s: seconds until an answer must be complete, pauses included.
        start_timeout_s: seconds until the router must be ready, and as many until it has registered the engines.
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
            # The client already bounds the requests in flight; a second queue would only hide that bound.
            "max-concurrent-requests": -1,
        }
        return [
            *(f"--{name}={value}" for name, value in valued.items()),
            # The client retries. The router would also retry after 408 and 429, uncounted.
            "--disable-retries",
            *(["--pd-disaggregation"] if self.splits_prefill else []),
            *(["--worker-urls", *workers] if workers else []),
        ]


@dataclass(frozen=True, slots=True)
class Worker:
    """An engine as a router knows it.

    Arguments:
        url: its address.
        worker_type: the part of a request that it computes.
        bootstrap_port: of a prefill engine, where decode engines fetch the cache; 0: it is none.
    """

    url: str
    worker_type: WorkerType = "regular"
    bootstrap_port: int = 0

    @property
    def entry(self) -> dict[str, Any]:
        """The body of the request that registers it; with the key for the router's own requests to the engine."""
        key = engine_access().key_text
        entry = {"url": self.url, "api_key": key} if key else {"url": self.url}
        if self.worker_type == "regular":
            return entry
        port = {"bootstrap_port": self.bootstrap_port} if self.worker_type == "prefill" else {}
        return {**entry, "worker_type": self.worker_type, **port}


class Router(Server):
    """A router that the run starts; it sends each request to one of ``workers``.

    Arguments:
        settings: of the router.
        workers: URLs of engines that answer already.
    """

    # Not /health, which returns 200 without any engine; not /readiness, which logs an error each time it returns 503.
    probe = "/liveness"

    def __init__(self, settings: RouterSettings, workers: Sequence[str] = ()) -> None:
        self.settings = settings
        self._workers = list(workers)
        super().__init__(
            "router",
            host=settings.host,
            env={**needed_environment(), "NO_COLOR": "1", ENGINE_KEY: engine_access().key_text},
            log_file=settings.log_file,
            start_timeout_s=settings.start_timeout_s,
        )

    def command(self, port: int, second: int) -> list[str]:
        """As :meth:`Server.command`; it serves its metrics on ``second``."""
        arguments = self.settings.arguments(port=port, metrics_port=second, workers=self._workers)
        return [sys.executable, "-c", LAUNCH, self.settings.policy, *arguments]

    def wait_ready(self) -> None:
        """As :meth:`Server.wait_ready`; also waits until all engines are registered.

        Raises:
            EngineError: it died, or did not register an engine within ``start_timeout_s``.
        """
        super().wait_ready()
        self._wait_workers()

    def add(self, *workers: str | Worker) -> None:
        """Register engines, given as :class:`Worker` or by URL, and wait until they get requests.

        Raises:
            EngineError: the router refused one, or did not register all within ``start_timeout_s``.
        """
        for worker in workers:
            one = Worker(worker) if isinstance(worker, str) else worker
            self._call("POST", "/workers", one.entry)
            self._workers.append(one.url)
        self._wait_workers()

    def remove(self, worker: str) -> None:
        """Send no further requests to the engine at ``worker``.

        Raises:
            EngineError: the router does not know it.
        """
        known = {entry["url"]: entry["id"] for entry in self._entries()}
        if worker not in known:
            raise EngineError(f"The router does not know {worker}, which was to be removed; it knows {sorted(known)}")
        self._call("DELETE", f"/workers/{known[worker]}")
        self._workers.remove(worker)

    def healthy_workers(self) -> list[str]:
        """URLs of the engines that get requests now, sorted."""
        return sorted(entry["url"] for entry in self._entries() if entry["is_healthy"])

    def _wait_workers(self) -> None:
        deadline_s = time.monotonic() + self.settings.start_timeout_s
        while missing := sorted(set(self._workers) - set(self.healthy_workers())):
            if time.monotonic() > deadline_s:
                raise EngineError(f"The router at {self.url} did not register {missing}: {self._process.last_lines(3)}")
            time.sleep(REGISTRATION_POLL_S)

    def _entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._call("GET", "/workers")["workers"]
        return entries

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        self.check_alive()
        return ask_router(self.url, method, path, body)


CALL_LIMIT_S = 10.0
REGISTRATION_LIMIT_S = 60.0
POLL_S = 0.05


class RemoteRouter:
    """The external sglang-router at ``url``: engines are registered, and removed again at the end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._added: list[str] = []
        send_key_to(url)

    def add(self, workers: Sequence[str]) -> None:
        """Register the engines at these URLs; :meth:`deregister` leaves alone those that the router knew before.

        Raises:
            EngineError: the router does not answer, refused one, or did not register all within a minute.
        """
        known = {entry["url"] for entry in self._entries()}
        for worker in workers:
            if worker not in known:
                ask_router(self.url, "POST", "/workers", Worker(worker).entry)
                self._added.append(worker)
        deadline_s = time.monotonic() + REGISTRATION_LIMIT_S
        while missing := set(workers) - {entry["url"] for entry in self._entries() if entry["is_healthy"]}:
            if time.monotonic() > deadline_s:
                raise EngineError(f"The router at {self.url} did not register {sorted(missing)}")
            time.sleep(POLL_S)

    def deregister(self) -> None:
        """Remove the engines that :meth:`add` registered.

        Raises:
            EngineError: the router does not answer, or refused.
        """
        added, self._added = self._added, []
        for entry in self._entries() if added else []:
            if entry["url"] in added:
                ask_router(self.url, "DELETE", f"/workers/{entry['id']}")

    def _entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = ask_router(self.url, "GET", "/workers")["workers"]
        return entries


def ask_router(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer of the router at ``url``, parsed from JSON; None: an empty answer.

    Raises:
        EngineError: it does not answer within 10 seconds, not in JSON, or it refused.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=CALL_LIMIT_S)
    try:
        headers = {"Content-Type": "application/json", **engine_headers(url)}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"The router at {url} did not answer {method} {path}: {error!r}") from error
    finally:
        connection.close()
    if response.status >= http.client.BAD_REQUEST:
        refusal = f"The router at {url} refused {method} {path} with status {response.status}: {text}"
        raise EngineError(" ".join([refusal, *key_advice(response.status)]))
    try:
        return json.loads(text) if text else None
    except ValueError:
        raise EngineError(f"The server at {url} is no sglang-router: {method} {path} returned {text[:100]!r}") from None
