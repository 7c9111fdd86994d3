"""Plugin ``prometheus``; imports nothing heavy."""

from __future__ import annotations

from slime_core import Registration, hookimpl

__all__: list[str] = []


@hookimpl
def slime_register(add: Registration) -> None:
    add.options("slime_trackers.options:PrometheusOptions")
    add.tracker("prometheus", "slime_trackers.prometheus_server:Prometheus")
