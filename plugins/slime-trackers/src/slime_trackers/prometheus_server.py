"""The tracker ``prometheus``, an HTTP server in the driver.

    GET http://127.0.0.1:9464/metrics          Authorization: Bearer KEY

    # HELP slime_rollout_raw_reward rollout/raw_reward
    # TYPE slime_rollout_raw_reward gauge
    slime_rollout_raw_reward{metric="rollout/raw_reward",run="2026-11-23-12-00-00"} 0.41

The key is created when the run starts. It is in the file ``trackers/prometheus.key`` of the run folder, which only its
owner can read; ``trackers/prometheus.yml`` is the configuration with which Prometheus scrapes the run.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer

from slime_core import RunView
from slime_trackers.options import PrometheusOptions

__all__ = ["Prometheus"]

SCRAPE = """\
scrape_configs:
  - job_name: slime
    authorization:
      credentials_file: {key}
    static_configs:
      - targets: ["{host}:{port}"]
"""


class Prometheus:
    """The latest value of every metric, for a Prometheus server to scrape until the run ends.

    Attributes:
        port: port of the server, valid once started.
    """

    def __init__(self, options: PrometheusOptions) -> None:
        self._options = options
        self._latest: dict[str, float] = {}
        self._run = ""
        self._server: ThreadingWSGIServer | None = None
        self.port = options.port

    def start(self, run: RunView) -> None:
        self._run = "" if run.folder is None else run.folder.name
        registry = CollectorRegistry()
        registry.register(self)
        key = secrets.token_urlsafe(32)
        app = _with_key(make_wsgi_app(registry, disable_compression=True), key)
        self._server = make_server(self._options.host, self._options.port, app, ThreadingWSGIServer, _Quiet)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="prometheus", daemon=True).start()
        if run.folder is not None:
            self._write(run.folder / "trackers", key)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest = {**self._latest, **metrics, "step": max(step, self._latest.get("step", 0))}

    def close(self, error: BaseException | None) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric families of one scrape; metrics whose names differ only in punctuation share one."""
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in self._latest.items():
            name = "slime_" + re.sub(r"\W+", "_", metric, flags=re.ASCII)
            if name not in families:
                families[name] = GaugeMetricFamily(name, metric, labels=("metric", "run"))
            families[name].add_metric((metric, self._run), value)
        yield from families.values()

    def _write(self, folder: Path, key: str) -> None:
        folder.mkdir(exist_ok=True)
        path = folder / "prometheus.key"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
        text = SCRAPE.format(key=path.resolve(), host=self._options.host, port=self.port)
        (folder / "prometheus.yml").write_text(text, encoding="utf-8")


class _Quiet(WSGIRequestHandler):
    """Logs nothing to the driver's output, and drops clients that send nothing for 10 s."""

    timeout = 10

    def log_message(self, format: str, *args: object) -> None:
        pass


App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def _with_key(app: App, key: str) -> App:
    """Wrap ``app``: requests without ``key`` are answered with 401."""
    expected = f"Bearer {key}".encode()

    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        header = str(environ.get("HTTP_AUTHORIZATION", "")).encode()
        if hmac.compare_digest(header, expected):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"The key is in trackers/prometheus.key of the run folder.\n"]

    return checked
